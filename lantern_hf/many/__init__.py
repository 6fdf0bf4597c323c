"""Many prompts to a folder of pictures and a manifest, on one process or several, stopped and resumed at will."""

from lantern_hf.many.report import ManyReport
from lantern_hf.many.requests import ImageRequest, read_requests
from lantern_hf.many.run import generate_many

__all__ = ["ImageRequest", "ManyReport", "generate_many", "read_requests"]
