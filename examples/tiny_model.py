"""A tiny Qwen2-style model and a byte-level chat tokenizer, saved as an ordinary Hugging Face folder.

    python examples/tiny_model.py FOLDER

Its words are those of the bundled chats.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# The generation tags say which part the assistant writes; they leave no trace in the text.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(
    texts: list[str], *, vocab_size: int = 640, max_length: int = 1024
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a few texts: common words become one token, and any text has one."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )


def make_tiny_model(folder: Path, texts: list[str], *, seed: int = 0, max_length: int = 1024) -> None:
    """Write an untrained model of about a million parameters, in bfloat16 as checkpoints are."""
    tokenizer = make_tokenizer(texts, max_length=max_length)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    lines = (Path(__file__).parent / "data" / "chats.jsonl").read_text().splitlines()
    make_tiny_model(Path(sys.argv[1]), [m["content"] for line in lines for m in json.loads(line)["messages"]])
