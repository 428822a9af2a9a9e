"""A model directory and a dataset to train it on, without a hub: sizes are real, weights and tokens random.

    python benchmarks/random_model.py --like llama-3.2-1b --seq-length 1048576 --output /tmp/llama-1b
    python train.py --model /tmp/llama-1b/model --dataset /tmp/llama-1b/data --seq-length 1048576 ...

For steps whose time and memory are to be measured and whose loss has to fall, not for a model of any use. Weights are
bf16, drawn on the GPU if there is one, else by all CPU cores. Small token ids are more frequent than large ones, as
words are, so that there is something to learn.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from easy_context.planner.known_models import KNOWN_MODELS

FAMILIES = {name: sizes for name, sizes in KNOWN_MODELS.items() if sizes["model_type"] == "llama"} | {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
ROPE_THETA = 5e5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=FAMILIES, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for DIR/model and DIR/data")
    parser.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens of a row of data")
    parser.add_argument("--rows", type=int, default=1, help="of data; of one, every step sees the same batch")
    parser.add_argument("--layers", type=int, help="fewer or more than the model has")
    args = parser.parse_args()
    sizes = dict(FAMILIES[args.like])
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    write_model(sizes, args.seq_length, args.output / "model")
    write_data(sizes["vocab_size"], args.seq_length, args.rows, args.output / "data")
    print(f"{args.output}/model and {args.output}/data")


def write_model(sizes: dict, seq_length: int, folder: Path) -> None:
    """A Llama of these sizes with its tokenizer; weights of standard deviation 0.02, norms 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from easy_context.rope import set_rope

    sizes = {name: size for name, size in sizes.items() if name != "model_type"}
    config = LlamaConfig(max_position_embeddings=seq_length, bos_token_id=0, eos_token_id=1, **sizes)
    set_rope(config, theta=ROPE_THETA)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to_empty(device=device)
    model.tie_weights()

    def fill(numbered: tuple[int, torch.nn.Parameter]) -> None:
        seed, weight = numbered
        generator = torch.Generator(device).manual_seed(seed)
        weight.data.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.data.fill_(1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a generator on CPU draws with one thread
        list(pool.map(fill, enumerate(model.parameters())))
    model.save_pretrained(folder, max_shard_size="4GB")

    bytes_and_marks = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(bytes_and_marks, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def write_data(vocab: int, seq_length: int, rows: int, folder: Path) -> None:
    """A dataset on disk, `rows` rows of `seq_length` tokens in `input_ids`."""
    from datasets import Dataset, Features, Sequence, Value

    uniform = torch.rand(rows, seq_length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = (vocab * uniform**4).int().numpy()
    features = Features({"input_ids": Sequence(Value("int32"))})
    Dataset.from_dict({"input_ids": list(ids)}, features=features).save_to_disk(str(folder))


if __name__ == "__main__":
    main()
