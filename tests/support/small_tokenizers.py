"""Small tokenizers of the kinds that models have."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.demo import MODEL_DIRECTORY

CORPUS = [
    "the cat sat on the mat and the hat",
    "a cat in a hat is not uncommon at all",
    "  two  spaces  \n\n lines",
] * 4


def trained(pre_tokenizer, decoder, alphabet) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with about 60 merges, two special tokens that it does not list, and one that it does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 60, initial_alphabet=alphabet, special_tokens=["<eos>", "<a>", "<b>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: a character that it does not know becomes one token per byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "b", "▁a", "é", "�"]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "▁")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def small_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted({letter for text in CORPUS for letter in text if letter != " "} | set("bcdfgjkpqvwxyz▁"))
    return {
        "bytes": AutoTokenizer.from_pretrained(MODEL_DIRECTORY),
        "byte-level BPE": trained(byte_level, decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()),
        "SentencePiece": trained(pre_tokenizers.Metaspace(), decoders.Metaspace(), letters),
        # Llama 2's way to write its decoder.
        "stripping": trained(
            pre_tokenizers.Metaspace(),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            letters,
        ),
        "byte fallback": with_byte_fallback(),
    }
