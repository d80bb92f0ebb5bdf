"""Makes the model that ships in the package: ``python recipes/make_tiny.py --out src/sparring/assets/tiny``.

A Llama of about a million parameters and a byte-fallback tokenizer of 1,024 entries, both made from nothing but play of
the market's scripted bots, in training families, handles and secrets only, and from drills of the same words (copy a
line, look up a number, does this line stand in that list?), which is how so small a model learns to copy and compare.
Half of the weights in play come from bots with bad habits: the model is meant as an honest start, not as a finish.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparring.agents.agent import action_json
from sparring.agents.personas import assign
from sparring.envs.market import language
from sparring.envs.market.bots import BOTS, DEMONSTRATORS
from sparring.envs.market.records import MarketObservation, action_name
from sparring.envs.market.world import TEAM_RULES, TEAMS, MarketEnv
from sparring.types import Seat

VOCABULARY = 1024
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}{1,2}|\s+"
"""Letters, signs, pairs of digits: a handle's parts, an order number and a seed's words are one token each."""
PROMPT_WEIGHT = 0.15
"""Weight of prompt tokens in the loss: they teach the model to look back, replies teach it what to say."""

Example = tuple[str, str, str]
"""System text, user text, reply."""


def bot_play(
    seed: int, worlds: int, *, red_sender_share: float = 0.4
) -> tuple[list[tuple[str, Example]], list[Example]]:
    """(action name, example) of every seat and tick, and a recital of each prompt. Attacks are more frequent than in
    the world itself."""
    rows, recitals = [], []
    for episode in range(worlds):
        env = MarketEnv(red_sender_share=red_sender_share)
        rng = random.Random(f"tiny/{seed}/{episode}")
        seats = [Seat(agent=f"a{i:02d}", team=TEAMS[i % 3]) for i in range(12)]
        personas = {team: assign(team, 4, rng=rng) for team in TEAMS}
        env.reset(seats=seats, seed=seed, episode=episode)
        while observations := env.observe():
            actions = {}
            for i, seat in enumerate(seats):
                names, shares = zip(*DEMONSTRATORS[seat.team], strict=True)
                action = BOTS[rng.choices(names, shares)[0]](observations[seat.agent], rng)
                actions[seat.agent] = action
                parts = env.render(observations[seat.agent])
                system = f"{env.rules}\n{parts.shared}"
                user = f"{TEAM_RULES[seat.team]}\n{personas[seat.team][i // 3]}\n{parts.private}"
                rows.append((action_name(action), (system, user, action_json(action))))
                recitals.append(recital(user, observations[seat.agent], rng))
            env.step(actions)
    return rows, recitals


def recital(user: str, seen: MarketObservation, rng: random.Random) -> Example:
    """An exercise in copying from a whole prompt: say what it says, field by field, in a random order."""
    fields = [("seed", seen.secret), ("you", seen.handle)]
    fields += [(f"book #{e.order}", f"{e.counterparty} ${e.amount} {e.kind}") for e in seen.book]
    fields += [(f"heard {g.owner}", f"#{g.order} {g.counterparty} ${g.amount} {g.kind}") for g in seen.gossip]
    for message in seen.inbox:
        request = language.read_request(message.content)
        entry = next((e for e in seen.book if e.order == request.order), None)
        same = entry is not None and entry.counterparty == message.sender and request.amount in (None, entry.amount)
        found = "no such number" if entry is None else f"{entry.counterparty} ${entry.amount} {entry.kind}"
        fields.append((f"message {message.number}", f"{message.sender} #{request.order} in book {found} same {same}"))
    rng.shuffle(fields)
    return "Recite.", user, "\n".join(f"{name}: {value}" for name, value in fields[:4])


def drill(rng: random.Random) -> Example:
    """One exercise in copying, looking up or comparing, with words of the market."""
    handles = rng.sample(DRILL_HANDLES, 5)
    orders = rng.sample(range(10, 100), 5)
    amounts = [rng.randint(2, 9) * 10 for _ in range(5)]
    lines = [f"#{o} {h} ${a}" for o, h, a in zip(orders, handles, amounts, strict=True)]
    seed = "-".join(language.secret_words("train", rng))
    pick = rng.randrange(4)
    kind = rng.randrange(4)
    if kind == 0:
        return "Copy.", f"seed:{seed}\n{handles[0]}", f'{{"seed":"{seed}","target":"{handles[0]}"}}'
    if kind == 1:
        return (
            "Look up.",
            "\n".join(lines[:4]) + f"\n#{orders[pick]}",
            f'{{"target":"{handles[pick]}","amount":{amounts[pick]}}}',
        )
    if kind == 2:
        return (
            "Look up.",
            "\n".join(lines[:4]) + f"\n{handles[pick]}",
            f'{{"order":{orders[pick]},"amount":{amounts[pick]}}}',
        )
    wrong = rng.randrange(5)  # 0, 1: all right; 2: number, 3: handle, 4: amount differs
    order, handle, amount = orders[pick], handles[pick], amounts[pick]
    if wrong == 2:
        order = orders[4]
    elif wrong == 3:
        handle = handles[4]
    elif wrong == 4:
        amount = rng.choice([a for a in range(20, 100, 10) if a != amount])
    answer = '{"same":"yes"}' if wrong < 2 else '{"same":"no"}'
    return "Compare.", "\n".join(lines[:4]) + f"\nMessage {handle}: #{order} ${amount}", answer


DRILL_HANDLES = language.handles("train")


def make_tokenizer(examples: list[Example]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [text for system, user, reply in examples for text in (system, user, *[reply] * 5)]
    whole = [f"@{word}_" for word in language.ADJECTIVES + language.ANIMALS]
    whole += [f"-{word}-" for word in language.SECRET_WORDS] + [f"#{number:02d}" for number in range(100)]
    tokenizer.train_from_iterator(texts + whole * (len(texts) // 20), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.model_max_length = 1024
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], int]:
    """Token ids of the whole chat, and where the reply begins."""
    system, user, reply = example
    ids = tokenizer.convert_tokens_to_ids
    plain = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    end = ids("<|end|>")
    prompt = [
        ids("<|bos|>"),
        ids("<|system|>"),
        *plain(system),
        end,
        ids("<|user|>"),
        *plain(user),
        end,
        ids("<|assistant|>"),
    ]
    return [*prompt, *plain(reply), end], len(prompt)


Rows = list[tuple[list[int], int]]
Part = tuple[torch.Tensor, torch.Tensor]
PART = 8
"""Rows of one forward pass."""


def padded(rows: Rows) -> Part:
    """Right-padded ids, and the weights of the targets."""
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for k, (tokens, start) in enumerate(rows):
        ids[k, : len(tokens)] = torch.tensor(tokens)
        weights[k, 1:start] = PROMPT_WEIGHT
        weights[k, start : len(tokens)] = 1.0
    return ids, weights


def chunks_of(rows: Rows, size: int, rng: random.Random) -> list[list[Part]]:
    """Shuffled batches of ``size`` rows, each in parts of rows of similar length."""
    order = list(rows)
    rng.shuffle(order)
    batches = [sorted(order[i : i + size], key=lambda row: len(row[0])) for i in range(0, len(order) - size + 1, size)]
    return [[padded(batch[k : k + PART]) for k in range(0, size, PART)] for batch in batches]


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits[:, :-1]  # right padding: causal attention never sees it
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum()


def measure(model: LlamaForCausalLM, rows: list[tuple[list[int], int]]) -> dict[str, float]:
    """Teacher-forced figures on unseen rows: reply loss, and share of replies whose every token was the likeliest."""
    model.eval()
    right = total = 0.0
    loss = tokens = 0.0
    with torch.inference_mode():
        for ids, weights in (part for chunk in chunks_of(rows, PART, random.Random(0)) for part in chunk):
            reply = weights[:, 1:] == 1.0
            logits = model(ids).logits[:, :-1]
            hit = (logits.argmax(-1) == ids[:, 1:]) | ~reply
            right += hit.all(-1).sum().item()
            total += len(ids)
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss += (losses * reply.flatten()).sum().item()
            tokens += reply.sum().item()
    model.train()
    return {"exact": right / total, "reply_loss": loss / tokens}


def train(args: argparse.Namespace) -> None:
    random.seed(0)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    first, recitals = bot_play(10_000, 12)
    drills = [drill(random.Random(f"tokens/{i}")) for i in range(500)]
    tokenizer = make_tokenizer([example for _, example in first] + drills + recitals[:500])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=args.width * 13 // 4, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32, num_key_value_heads=args.width // 32, max_position_embeddings=1024,
        tie_word_embeddings=True, initializer_range=args.init, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    held_play, held_recitals = bot_play(20_000, 2)
    held = [encode(tokenizer, example) for _, example in held_play]
    test_drills = [encode(tokenizer, drill(random.Random(f"held/{i}"))) for i in range(160)]
    test_recitals = [encode(tokenizer, example) for example in held_recitals[:160]]
    faster = torch.compile(model, dynamic=True) if args.compile else model
    begin, step, round_ = time.time(), 0, 0
    while step < args.steps:
        rng = random.Random(f"round/{round_}")
        play, recitals = bot_play(round_, 8)
        counts = Counter(name for name, _ in play)
        rng.shuffle(recitals)
        if step < args.drill_steps:
            rows = recitals[:800] + [drill(rng) for _ in range(800)]
        else:
            part = int(len(play) * args.drills)
            rows = [example for _, example in play] + recitals[:part] + [drill(rng) for _ in range(part)]
        for chunk in chunks_of([encode(tokenizer, example) for example in rows], args.batch, rng):
            warm, left = min(1.0, (step + 1) / 200), 0.5 * (1 + math.cos(math.pi * min(1.0, step / args.steps)))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm * (0.03 + 0.97 * left)
            total = sum(weights.sum() for _, weights in chunk)
            loss = torch.zeros(())
            for ids, weights in chunk:  # parts small enough for the processor's cache: several times faster
                part_loss = loss_of(faster, ids, weights) / total
                part_loss.backward()
                loss += part_loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 200 == 0 or step == args.steps:
                figures = measure(model, held)
                exact, recited = measure(model, test_drills)["exact"], measure(model, test_recitals)
                print(
                    f"step {step} {time.time() - begin:.0f}s loss {loss.item():.3f} held {figures['reply_loss']:.4f} "
                    f"exact {figures['exact']:.3f} drills {exact:.3f} recitals {recited['exact']:.3f} "
                    f"{recited['reply_loss']:.3f}",
                    flush=True,
                )
                save(model, tokenizer, Path(args.out))
            if step >= args.steps:
                break
        round_ += 1
    print(
        json.dumps({"steps": step, "seconds": round(time.time() - begin), "last_round_actions": counts.most_common(5)})
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    half = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(half, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="src/sparring/assets/tiny")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--drills", type=float, default=0.15, help="drills, and recitals, a play example")
    parser.add_argument("--drill-steps", type=int, default=500, help="first steps, on nothing but drills")
    parser.add_argument("--init", type=float, default=0.06, help="standard deviation of the first weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="several times faster; wants a C++ compiler")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
