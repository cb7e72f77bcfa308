"""The files that a merged model gets beside its weights: its student's tokenizer, and a card."""

from __future__ import annotations

import errno

from experts.bound_files import TOKENIZER_FILES, matching_files
from opd.config import PipelineConfig
from opd.errors import ModelError
from pipelines.inputs.read import Inputs
from pipelines.merging import card


def read_accompanying_files(config: PipelineConfig, inputs: Inputs) -> dict[str, bytes]:
    """Return file name -> content. A merge reads these files once before any compute, to see that it can, and once at its end.

    Raises: ModelError for a file of a model's directory that cannot be read.
    """
    try:
        files = matching_files(config.student.model, TOKENIZER_FILES)
        if not files:  # the student was moved away during the merge
            raise FileNotFoundError(errno.ENOENT, "no tokenizer files", str(config.student.model))
        contents = {file.name: file.read_bytes() for file in files}
        return contents | {card.NAME: card.model_card(config, inputs).encode()}
    except OSError as error:
        raise ModelError.at(
            error.filename or config.student.model,
            found=error.strerror or str(error),
            wanted="a file that can be read: the merged model gets a copy of its student's tokenizer, and a card with "
            "the licences that the models' directories name",
            fix="correct the file or its rights, or take it out of the directory",
        ) from None
