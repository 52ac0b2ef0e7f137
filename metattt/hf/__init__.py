"""Models of ours for Hugging Face Transformers.

After `import metattt.hf`, `AutoConfig` and `AutoModelForCausalLM` know the folders that `metattt export` writes.
"""

from metattt.hf.cache import MetaTTTCache
from metattt.hf.config import MetaTTTConfig
from metattt.hf.model import MetaTTTForCausalLM
from metattt.hf.tokenizer import to_transformers
from metattt.optional import need

_transformers = need("transformers", extra="hf", what="metattt.hf")
_transformers.AutoConfig.register(MetaTTTConfig.model_type, MetaTTTConfig)
_transformers.AutoModelForCausalLM.register(MetaTTTConfig, MetaTTTForCausalLM)
# by this name, Trainer's label smoothing knows that labels are of the next token
_known = _transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_known[MetaTTTConfig.model_type] = MetaTTTForCausalLM.__name__

__all__ = ["MetaTTTCache", "MetaTTTConfig", "MetaTTTForCausalLM", "to_transformers"]
