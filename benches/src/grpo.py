"""Times steps of GRPO by trl, and by a plain loop of transformers and a compiled step, on random weights.

    python3 -P grpo.py trl|loop PROMPTS GROUP PROMPT_TOKENS NEW_TOKENS MICRO_BATCH [paged] [tiny]

Without -P, Python imports the script torch.py of this folder in place of torch. The model is GPT-2 of 124M parameters in bf16,
the loss is DAPO's with beta 0.04, and the end token is ignored. Prints one JSON object: median milliseconds of a step and of its
phases, and the bytes that torch reserved.
"""

import json
import statistics
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BETA, EPSILON, STEPS, WARM = 0.04, 0.2, 6, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model(tiny):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2) if tiny else GPT2Config()
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 50256
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def reserved():
    return torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0


def rewards_of(ids):
    return (ids % 2 == 0).sum(-1).float()


def show(by, times, **more):
    print(json.dumps(dict(by=by, ms=statistics.median(times[WARM:]), samples=times, reserved=reserved(), **more)), flush=True)


def by_trl(prompts, group, prompt, new, micro, paged, tiny):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(50257)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t50256", pad_token="t50256", unk_token="t0")
    text = [" ".join(f"t{(p * 7919 + at * 104729) % 50000}" for p in range(prompt)) for at in range(prompts * (STEPS + WARM))]
    config = GRPOConfig(
        output_dir="/tmp/trl",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        max_steps=STEPS + WARM,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=prompts * group // micro,
        num_generations=group,
        max_completion_length=new,
        generation_kwargs=dict(min_new_tokens=new),
        beta=BETA,
        epsilon=EPSILON,
        learning_rate=1e-6,
        bf16=DEVICE == "cuda",
        gradient_checkpointing=False,
        use_cpu=DEVICE == "cpu",
        **({"use_transformers_continuous_batching": True} if paged else {}),
    )

    class Clock(TrainerCallback):
        times, begin = [], None

        def on_step_begin(self, *args, **kwargs):
            sync()
            self.begin = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            sync()
            self.times.append((time.perf_counter() - self.begin) * 1e3)

    clock = Clock()
    # trl reads its reference from a folder.
    folder = "/tmp/grpo-model"
    model(tiny).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completion_ids, **_: [float(sum(i % 2 == 0 for i in own)) for own in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": text}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    begin = time.perf_counter()
    trainer.train()
    sync()
    show("trl", clock.times, whole_s=time.perf_counter() - begin, paged=paged)


def by_loop(prompts, group, prompt, new, micro, paged, tiny):
    """Generates by transformers, and learns by a compiled step of torch."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    net = model(tiny).to(DEVICE)
    reference = model(tiny).to(DEVICE, dtype).eval()
    sampler = model(tiny).to(DEVICE, dtype).eval()
    sampler.generation_config.cache_implementation = "static"
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=DEVICE == "cuda")
    count = prompts * group * new

    def numbers(of, tokens):
        logits = of(tokens[:, :-1]).logits[:, prompt - 1 :].float()
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, prompt:, None])[..., 0]

    @torch.compile
    def learn(tokens, advantage, known):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            own = numbers(net, tokens)
        ratio = torch.exp(own - own.detach())
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
        far = known - own
        return -(gain - BETA * (far.exp() - far - 1)).sum() / count

    @torch.compile
    def measure(tokens):
        with torch.no_grad():
            return numbers(reference, tokens)

    times, phases = [], []
    for step in range(STEPS + WARM):
        sync()
        begin = time.perf_counter()
        with torch.no_grad():
            for own, other in zip(sampler.parameters(), net.parameters()):
                own.copy_(other)
            ids = [[(p * 7919 + (at + 31 * step) * 104729) % 50000 for p in range(prompt)] for at in range(prompts)]
            ids = torch.tensor(ids, device=DEVICE).repeat_interleave(group, 0)
            options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0)
            if paged:
                from transformers import GenerationConfig

                made = sampler.generate_batch(
                    inputs=ids.tolist(), generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=50256, **options)
                )
                tokens = [made[key].generated_tokens for key in sorted(made, key=lambda key: int(key.split("_")[-1]))]
                tokens = torch.cat([ids, torch.tensor(tokens, device=DEVICE)], 1)
            else:
                tokens = sampler.generate(ids, attention_mask=torch.ones_like(ids), **options)
        sync()
        sampled = time.perf_counter()
        score = rewards_of(tokens[:, prompt:]).view(prompts, group)
        advantage = ((score - score.mean(1, keepdim=True)) / (score.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        known = torch.cat([measure(part) for part in tokens.split(micro)])
        sync()
        referred = time.perf_counter()
        for part, own, fixed in zip(tokens.split(micro), advantage.split(micro), known.split(micro)):
            learn(part, own, fixed).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sync()
        end = time.perf_counter()
        times.append((end - begin) * 1e3)
        phases.append([(sampled - begin) * 1e3, (referred - sampled) * 1e3, (end - referred) * 1e3])
    sample, refer, own = (statistics.median(each) for each in zip(*phases[WARM:]))
    show("loop", times, sample_ms=sample, reference_ms=refer, learn_ms=own, paged=paged)


def main(how, *args):
    prompts, group, prompt, new, micro = map(int, args[:5])
    run = dict(trl=by_trl, loop=by_loop)[how]
    run(prompts, group, prompt, new, micro, "paged" in args, "tiny" in args)


main(*sys.argv[1:])
