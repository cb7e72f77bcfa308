"""Experts that only write text: `opd.servers` asks them and keeps what they wrote, `teaching` puts it into the steps.

prompt ──▶ in the file? ──no──▶ server ──▶ file ──▶ in the student's tokens ──▶ in the place of the student's response,
                                                                             or what a discriminator compares it with
"""
