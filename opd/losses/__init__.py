"""Objectives: pure tensor functions behind one dictionary."""

from opd.losses.reverse_kl import reverse_kl

OBJECTIVES = {"reverse_kl": reverse_kl}
