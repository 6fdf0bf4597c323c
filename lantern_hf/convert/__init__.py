"""Published LANTERN, LlamaGen, Chameleon-VQ and EAGLE-1 files into folders that `from_pretrained` loads.

`convert` reads one checkpoint and writes one folder; `convert_pipeline` puts several into the folder of a
`LanternPipeline`. Nothing in a source file is ever run, and a result is whole or not there.
"""

from lantern_hf.convert.api import convert
from lantern_hf.convert.assemble import convert_pipeline
from lantern_hf.convert.kinds import KINDS
from lantern_hf.convert.report import ConversionReport

__all__ = ["KINDS", "ConversionReport", "convert", "convert_pipeline"]
