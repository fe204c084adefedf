#!/usr/bin/env python3
"""Creates the demo checkpoint of this folder: a Llama of 5 million parameters that writes simple stories.

Each of the four steps is a subcommand. All except the first work without a network.

  prepare    clones the repositories in sources.tsv with `git` (400 MB from GitHub, at fixed commits): children's
             books of Project Gutenberg, in the public domain, and parts of the data set TinyStories, under
             CDLA-Sharing-1.0. Cleans the text and writes corpus.txt, with a line `<|endoftext|>` between stories.
             Takes 15 s after the clones.
  tokenizer  trains a byte-level BPE of 4096 tokens on corpus.txt and writes tokenizer.json,
             tokenizer_config.json, train.u16 and val.u16 (tokens; every 100th story is held out). Takes 30 s.
  train      trains on these arrays until --seconds or --passes is reached, saves the checkpoint in the format of
             transformers, and samples. Meant for one data-centre GPU; also runs on a CPU.
  sample     opens the checkpoint with transformers' Auto classes and writes three stories.

Needs numpy and tokenizers; `train` and `sample` also torch, safetensors and transformers 5.
"""

import argparse
import csv
import json
import lzma
import math
import random
import re
import shutil
import subprocess
import time
import unicodedata
from pathlib import Path

END = "<|endoftext|>"  # token 0, before and after every story
CONTEXT = 512
HERE = Path(__file__).resolve().parent
ASCII = str.maketrans({
    "‘": "'", "’": "'", "‚": "'", "`": "'", "´": "'", "“": '"', "”": '"', "„": '"', "–": "-", "—": "--", "―": "--",
    "…": "...", "\xa0": " ", "\xad": "", "\ufeff": "", "Æ": "Ae", "æ": "ae", "Œ": "Oe", "œ": "oe"})
# Start of a book, headings of parts without story, start of the notes, and text that prose does not contain.
BEGIN = re.compile(r"^.*(?:\*\*\* ?START OF|\*END ?\*? ?THE SMALL PRINT).*$", re.M)
FRONT = re.compile(r"preface|introduc|contents|illustrations|dedicat|foreword|glossary|bibliograph|about the author|"
                   r"to the reader|acknowledg|index\b|pronounc|by the same|books by|list of", re.I)
BACK = re.compile(r"^\W*(?:notes and references|notes|footnotes|transcriber'?s? notes?)\W*$", re.I | re.M)
STRAY = re.compile(r"gutenberg|e-?text\b|ebook|https?:|www\.|produced by|transcri|footnote|copyright|edition|illustrat|"
                   r"published|chapter [ivxl\d]|[\[\]{}|=<>#@^~\\/+*]|\d{4}|^\(.*\)$|^From '[^']*'\W*$", re.I)
COMMON = set("the and to of a in he was it that she his you her they with had for i said as on at but him so".split())
STORY = re.compile(r"\n\n(?=Once upon a time|One day, (?:a|an|there)\b|There (?:was|once was) an?\b|Once there was)")


def plain(text):
    """Returns the text in ASCII where possible, with straight quotes and without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.translate(ASCII)) if not unicodedata.combining(c))


def paragraph(lines):
    """Returns a paragraph of a book on one line; None for verse, a heading, a list or an editor's text."""
    text = " ".join(" ".join(lines).replace("_", "").split())
    full = [len(line.strip()) for line in lines[:-1]]
    verse = sum(line.startswith("  ") for line in lines) * 2 > len(lines) or (full[1:] and sum(full) < 46 * len(full))
    whole = re.match(r"[A-Z\"'(]", text) and re.search(r"[.!?:;,\"')-]$", text) and len(text.split()) > 2
    return text if whole and text.isascii() and not (verse or text.isupper() or STRAY.search(text)) else None


def book_stories(text):
    """Yields the chapters of a book as lists of paragraphs. More than one blank line separates chapters."""
    text = re.split(BEGIN, plain(text.replace("\r", "")))[-1]
    text = re.split(r"(?m)^(?:\*\*\* ?END OF|End of (?:the |this )?Project Gutenberg)", text)[0]
    text = re.sub(r"\s*\[Illustration[^\]]*\]\s*", "\n\n", text)
    notes = [m.start() for m in BACK.finditer(text) if m.start() > 0.6 * len(text)]
    heading = ""
    for block in re.split(r"\n[ \t]*\n(?:[ \t]*\n)+", text[:notes[0]] if notes else text):
        if len(block.split()) < 25:
            heading = block
            continue
        parts = [part.split("\n") for part in re.split(r"\n[ \t]*\n", block.strip("\n"))]
        if not FRONT.search(heading + " ".join(parts[0] if len(parts[0]) < 3 else [])):
            yield [p for p in map(paragraph, parts) if p]
        heading = ""


def tiny_stories(text):
    for story in text.split(END):
        lines = [" ".join(line.split()) for line in plain(story).split("\n") if line.strip()]
        if lines and lines[0][0].isupper() and lines[-1][-1] in ".!?\"'" and len(" ".join(lines).split()) < 700:
            yield lines


def prepare(args):
    from tokenizers.decoders import ByteLevel
    def blob(row):
        clone = args.clones / row["repository"].replace("/", "+")
        if not clone.exists():
            subprocess.check_call(["git", "clone", "-qn", f"https://github.com/{row['repository']}", clone])
        return subprocess.check_output(["git", "-C", clone, "show", f"{row['commit']}:{row['path']}"])
    def found(row):
        data = blob(row)
        if row["kind"] == "gpt2":  # GPT-2 tokens of 16 bits
            return tiny_stories(ByteLevel().decode([vocab[i] for i in memoryview(data).cast("H")]))
        text = data.decode("latin-1" if row["path"].endswith("-8.txt") else "utf-8", "replace")
        return book_stories(text) if row["kind"] == "book" else tiny_stories(STORY.sub(END, text))
    rows = list(csv.DictReader(open(HERE / "sources.tsv"), delimiter="\t"))
    vocab = {i: token for row in rows if row["kind"] == "vocab" for token, i in json.loads(blob(row)).items()}
    seen, stories, sizes = set(), [], {"books": 0, "TinyStories": 0}
    for row in (row for row in rows if row["kind"] != "vocab"):
        kind, least = ("books", 120) if row["kind"] == "book" else ("TinyStories", 40)
        for lines in found(row):
            words = [word.strip(".,!?;:\"'-").lower() for word in " ".join(lines).split()]
            text = "\n".join(line for line in lines if len(line) < 60 or line not in seen)
            english = sum(word in COMMON for word in words) > 0.25 * len(words)
            if english and len(words) >= least and text.isascii() and len(text) > 0.7 * len("\n".join(lines)):
                seen.update(lines)
                stories.append(text)
                sizes[kind] += len(text)
    random.Random(0).shuffle(stories)
    args.data.mkdir(parents=True, exist_ok=True)
    (args.data / "corpus.txt").write_text(f"\n{END}\n".join(stories) + "\n", encoding="utf-8")
    print(len(stories), "stories; bytes:", sizes)


def tokenizer(args):
    import numpy
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    stories = (args.data / "corpus.txt").read_text(encoding="utf-8").rstrip("\n").split(f"\n{END}\n")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=[END], initial_alphabet=alphabet)
    bpe.train_from_iterator(stories, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    bpe.save(str(args.data / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, "bos_token": END,
              "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False}
    (args.data / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, part in ("train", [s for i, s in enumerate(stories) if i % 100]), ("val", stories[::100]):
        ids = numpy.array([i for story in part for i in bpe.encode(story).ids], "<u2")
        ids.tofile(args.data / f"{name}.u16")
        print(f"{name}: {len(part)} stories, {len(ids)} tokens of {sum(map(len, part)) / len(ids):.2f} bytes")


def train(args):
    import numpy
    import torch
    from torch.nn import functional
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    def tokens(name):
        path = args.data / f"{name}.u16"
        data = path.read_bytes() if path.exists() else lzma.open(f"{path}.xz").read()
        return torch.from_numpy(numpy.frombuffer(data, "<u2").astype("int32")).to(device)
    data, held = tokens("train"), tokens("val")
    held = held[:len(held) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:args.val_rows]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=args.layers, head_dim=32,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)).to(device)
    for name, module in model.named_modules():  # dropout on the output of each block, before the residual sum
        if name.endswith(("o_proj", "down_proj")) and args.dropout:
            module.register_forward_hook(lambda m, _, out: functional.dropout(out, args.dropout, m.training))
    run = torch.compile(model) if args.compile else model
    weights = list(model.parameters())
    decay = [{"params": [p for p in weights if p.dim() == dim], "weight_decay": by} for dim, by in ((2, 0.1), (1, 0))]
    adam = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.95), fused=True)
    def loss_of(rows, net):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = net(input_ids=rows[:, :-1].long(), use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].long().flatten())
    @torch.no_grad()
    def validate():
        model.eval()
        loss = sum(loss_of(rows, model).item() * len(rows) for rows in held.split(64)) / len(held)
        model.train()
        return loss
    start, step, part, checks, best = time.perf_counter(), 0, 0.0, 0, math.inf
    while part < 1:
        rate = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * part)))
        adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = rate
        at = torch.randint(len(data) - CONTEXT, (args.batch, 1), device=device)
        loss = loss_of(data[at + torch.arange(CONTEXT + 1, device=device)], run)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 1:
            shown = loss.item()  # synchronises, so that the clock includes the work of the device
        seconds, passes = time.perf_counter() - start, step * args.batch * CONTEXT / len(data)
        part = max(seconds / args.seconds, passes / args.passes)
        if part >= (checks + 1) / 20:  # keeps the weights of the best of 20 checks
            checks, now = int(part * 20), validate()
            if now < best:
                best, kept = now, {name: value.clone() for name, value in model.state_dict().items()}
            print(f"{seconds:6.1f} s, step {step:5}, {passes:5.2f} passes: loss {shown:.3f}, val {now:.3f}", flush=True)
    model.load_state_dict(kept)
    model.to(torch.bfloat16)
    loss = validate()
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=200)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(args.data / name, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir() if file.suffix in (".json", ".safetensors"))
    print(f"result: {time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}: "
          f"{sum(p.numel() for p in weights) / 1e6:.2f} M parameters, {step} steps of {args.batch} x {CONTEXT} tokens "
          f"({passes:.1f} passes over {len(data) / 1e6:.2f} M) in {seconds:.0f} s, validation loss {loss:.3f} in bf16 "
          f"(perplexity {math.exp(loss):.1f}), {size / 1e6:.2f} MB")
    sample(args)


def sample(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.manual_seed(args.seed)
    tokens, model = AutoTokenizer.from_pretrained(args.out), AutoModelForCausalLM.from_pretrained(args.out)
    for prompt in "Once upon a time", "The little rabbit", "One day, a girl named Lily":
        ids = model.generate(**tokens(prompt, return_tensors="pt", return_token_type_ids=False))
        print("---", tokens.decode(ids[0], skip_special_tokens=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    for step in prepare, tokenizer, train, sample:
        command = steps.add_parser(step.__name__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(step=step)
        add = command.add_argument
        if step is not sample:
            add("--data", type=Path, default="data", help="folder of corpus.txt, the tokenizer and the arrays")
        if step is prepare:
            add("--clones", type=Path, default="clones", help="folder of the clones, owner+name each")
        if step in (train, sample):
            add("--out", type=Path, default=HERE, help="folder of the checkpoint")
            add("--seed", type=int, default=0, help="of the weights, the batches and the samples")
        if step is train:
            add("--seconds", type=float, default=200, help="most seconds to train for, compilation included")
            add("--passes", type=float, default=30, help="most passes over the text")
            add("--compile", action="store_true", help="use torch.compile: a minute to start, then faster steps")
            add("--batch", type=int, default=64, help="stretches of 512 tokens in a step")
            add("--layers", type=int, default=5, help="5 make 9.5 MB, 6 make 11.0 MB")
            add("--lr", type=float, default=2e-3, help="highest learning rate, reached in 100 steps")
            add("--dropout", type=float, default=0.1, help="share of each block's output left out")
            add("--val-rows", type=int, help="validate on so many stretches only")
    args = parser.parse_args()
    args.step(args)


if __name__ == "__main__":
    main()
