"""Models of Hugging Face's transformers in `ringcomm.parallel`: their weights, read and written on any grid."""

from ringcomm.pretrained.families import pretrained_config
from ringcomm.pretrained.weights import load_pretrained, save_pretrained

__all__ = ["load_pretrained", "pretrained_config", "save_pretrained"]
