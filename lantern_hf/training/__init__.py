"""Training of draft heads, for any target, on token sequences.

```python
from lantern_hf.training import TokenSequences, TrainingConfig, train_head

data = TokenSequences({"input_ids": ids, "attention_mask": mask}, tokens)
head = train_head(target, data, TrainingConfig(epochs=20), output_dir="runs/head")
```

`ConditionedSequences` with `read_rows` takes prompts, images and JSON lines, `self_distil` has the target generate its
own data, `FeatureCache` keeps what the target says on disk.
"""

from lantern_hf.training.conditioning import Conditioner, PipelineConditioner, ProcessorConditioner
from lantern_hf.training.config import TrainingConfig
from lantern_hf.training.data import TokenBatch, TokenSequences, collate
from lantern_hf.training.evaluate import evaluate_head
from lantern_hf.training.feature_cache import FeatureCache
from lantern_hf.training.features import TargetFeatures, drop_prompts, target_features
from lantern_hf.training.forecast import forecast_passes
from lantern_hf.training.losses import DraftObjective, draft_passes, entry_losses
from lantern_hf.training.self_distil import DistilConfig, self_distil
from lantern_hf.training.sequences import (
    ConditionedSequences,
    describe_rows,
    load_dataset_rows,
    read_prompts,
    read_rows,
)
from lantern_hf.training.trainer import train_head

__all__ = [
    "ConditionedSequences",
    "Conditioner",
    "DistilConfig",
    "DraftObjective",
    "FeatureCache",
    "PipelineConditioner",
    "ProcessorConditioner",
    "TargetFeatures",
    "TokenBatch",
    "TokenSequences",
    "TrainingConfig",
    "collate",
    "describe_rows",
    "draft_passes",
    "drop_prompts",
    "entry_losses",
    "evaluate_head",
    "forecast_passes",
    "load_dataset_rows",
    "read_prompts",
    "read_rows",
    "self_distil",
    "target_features",
    "train_head",
]
