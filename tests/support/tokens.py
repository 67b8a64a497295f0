"""What several tests share: see ``test_llm_tokens.py``."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<none>", "<s>", "</s>", "what", "is", "it", "a", "cat", "<unk>"]


def word_tokenizer(**special):
    """A word is a token, numbered as in ``WORDS``."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<none>"} | special
    )
