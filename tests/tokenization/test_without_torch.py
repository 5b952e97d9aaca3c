"""Tokenizing imports no torch, and later users of transformers still have torch."""

import subprocess
import sys

from tests.tokenization import small_tokenizers

SCRIPT = """
import sys
from pipeline.tokenization.tokenizer import Tokenizer
tokens = Tokenizer.from_folder(sys.argv[1]).encode("The pump")
print(len(tokens) > 0, "torch" in sys.modules)

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
config = PreTrainedConfig(dtype="bfloat16")
config.head_dim, config.rope_parameters = 8, {"rope_type": "linear", "factor": 2.0, "rope_theta": 16.0}
frequencies, _ = ROPE_INIT_FUNCTIONS["linear"](config, device="cpu")
import torch
print(config.dtype is torch.bfloat16, torch.equal(frequencies, torch.tensor([0.5, 0.25, 0.125, 0.0625])))
"""


def test_torch_is_imported_only_by_its_users(tmp_path):
    folder = small_tokenizers.save_byte_level(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout == "True False\nTrue True\n", done.stderr
