"""Training of draft heads, for any target, on token sequences.

```python
from lantern_hf.training import TokenSequences, TrainingConfig, train_head

data = TokenSequences({"input_ids": ids, "attention_mask": mask}, tokens)
head = train_head(target, data, TrainingConfig(epochs=20), output_dir="runs/head")
```
"""

from lantern_hf.training.config import TrainingConfig
from lantern_hf.training.data import TokenBatch, TokenSequences, collate
from lantern_hf.training.evaluate import evaluate_head
from lantern_hf.training.feature_cache import FeatureCache
from lantern_hf.training.features import TargetFeatures, drop_prompts, target_features
from lantern_hf.training.losses import DraftObjective, draft_passes, entry_losses
from lantern_hf.training.trainer import train_head

__all__ = [
    "DraftObjective",
    "FeatureCache",
    "TargetFeatures",
    "TokenBatch",
    "TokenSequences",
    "TrainingConfig",
    "collate",
    "draft_passes",
    "drop_prompts",
    "entry_losses",
    "evaluate_head",
    "target_features",
    "train_head",
]
