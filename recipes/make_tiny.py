"""Makes the model that ships in the package: ``python recipes/make_tiny.py --out src/sparring/assets/tiny``.

A Llama of about a million parameters and a byte-fallback tokenizer of 1,600 entries, both made from nothing but play of
the market's scripted bots, in training families, handles and secrets only, and from drills of the same words (copy a
line, look up a number, does this line stand in that list?), which is how so small a model learns to copy and compare.
Half of the weights in play come from bots with bad habits: the model is meant as an honest start, not as a finish.

The shipped weights came in pieces, as the recipe grew: 3,800 steps without thoughts, then ``--from-step 3800 --steps 4600
--drills 0.12 --lr 2.5e-3`` with thoughts, then the same to step 5,600 with badges in the thoughts and loose words. One
uninterrupted run gives a model alike, not the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparring.agents.agent import action_json
from sparring.agents.personas import assign
from sparring.envs.market import language, residents
from sparring.envs.market.bots import BOTS, DEMONSTRATORS, judge
from sparring.envs.market.records import MarketObservation, action_name
from sparring.envs.market.world import TEAM_RULES, TEAMS, MarketEnv
from sparring.types import Seat

VOCABULARY = 1600
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
THINK = ("<think>", "</think>")
TEMPLATE = (
    "{# a reply may begin with <think>...</think> #}"
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = r" ?[@_-]?\p{L}+| ?#\p{N}{1,2}|\p{N}{1,2}| ?[^\s\p{L}\p{N}@#]+|[@#]|\s+"
"""Words with the sign before them, order numbers, pairs of digits. A seed is then a chain of four tokens and a handle of
two: what copies them ("after this token came that one") is the first thing a small transformer learns. With the signs as
tokens of their own it had to look two tokens back, and after 600 steps it could not."""

Example = tuple[str, str, str]
"""System text, user text, reply."""


def bot_play(
    seed: int, worlds: int, *, red_sender_share: float = 0.4, loose: float = 0.5
) -> tuple[list[tuple[str, Example]], list[Example]]:
    """(action name, example) of every seat and tick, and a recital of each prompt. Attacks are more frequent than in
    the world itself, and this share of the residents' requests is in loose words: a request is known by what it asks
    for."""
    rows, recitals = [], []
    residents.word_request = loose_words(loose)
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
                reply = thought(observations[seat.agent]) + action_json(action)
                rows.append((action_name(action), (system, user, reply)))
                recitals.append(recital(user, observations[seat.agent], rng))
            env.step(actions)
    return rows, recitals


def loose_words(share: float) -> Callable[..., str]:
    """In place of ``language.word_request``: for this share of requests, words at random about what is asked."""
    pool = [w for family in language.families("train") for text in family.wordings for w in text.split()]
    pool += [w for team in TEAMS for text in assign(team, 20, rng=random.Random(0)) for w in text.lower().split()]
    pool = sorted({w for w in pool if w.strip(",.:").isalpha() and w.strip(",.:") != "seed"})

    def word(family: language.Family, *, order: int, amount: int, rng: random.Random) -> str:
        if not share or rng.random() >= share:
            return language.word_request(family, order=order, amount=amount, rng=rng)
        words = rng.sample(pool, rng.randint(2, 7))
        for what in (f"#{order}", f"${amount}" if family.ask == "pay" else "seed"):
            words.insert(rng.randint(0, len(words)), what)
        return " ".join(words)

    return word


def thought(seen: MarketObservation) -> str:
    """What a reply begins with when somebody asks for something: what is asked beside what the own book says, and what
    follows. All bots think the same and act as they please: a start that knows better than it does."""
    for message in seen.inbox:
        asked = language.read_request(message.content)
        if not asked.secret and asked.amount is None:
            continue
        entry = next((e for e in seen.book if e.order == asked.order), None)
        book = "none" if entry is None else f"{entry.counterparty} ${entry.amount} {entry.kind}"
        verdict = {"refuse": "no", "request_verification": "unsure"}.get(action_name(judge(seen, message)), "yes")
        what = "seed" if asked.secret else f"${asked.amount}"
        sender = message.sender + (" badge" if message.badge else "")
        sender += f" checked {message.checked}" if message.checked else ""
        return f"{THINK[0]}[{message.number}] {sender} #{asked.order} {what}; book {book}: {verdict}{THINK[1]}"
    return ""


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


def drill(rng: random.Random, longest: int = 20) -> Example:
    """One exercise in copying, looking up and comparing, with words of the market: a list of up to ``longest`` lines,
    and questions on it."""
    count = rng.randint(1, longest)
    handles = rng.sample(DRILL_HANDLES, count + 1)
    orders = rng.sample(range(10, 100), count + 1)
    amounts = [rng.randint(2, 9) * 10 for _ in range(count + 1)]
    seed = "-".join(language.secret_words("train", rng))
    lines = [f"#{o} {h} ${a}" for o, h, a in zip(orders[:count], handles[:count], amounts[:count], strict=True)]
    asked = rng.sample(range(count), min(count, 5))
    kind = rng.randrange(4)
    listed = [*lines[: count // 2], f"seed:{seed}", *lines[count // 2 :]]
    if kind == 0:
        return "Copy.", "\n".join(listed), "\n".join([f"seed:{seed}", *lines[:5]])
    if kind == 1:
        answers = [f"#{orders[k]} {handles[k]} ${amounts[k]}" for k in asked]
        return "Look up.", "\n".join([*listed, *(f"Find #{orders[k]}" for k in asked)]), "\n".join(answers)
    if kind == 2:
        answers = [f"{handles[k]} #{orders[k]} ${amounts[k]}" for k in asked]
        return "Look up.", "\n".join([*listed, *(f"Find {handles[k]}" for k in asked)]), "\n".join(answers)
    answers = []
    for k in asked:  # is this message what the list says?
        wrong = rng.randrange(6)
        order, handle, amount = orders[k], handles[k], amounts[k]
        if wrong == 0:
            order = orders[count]
        elif wrong == 1:
            handle = handles[count]
        elif wrong == 2:
            amount = rng.choice([a for a in range(20, 100, 10) if a != amount])
        answers.append((f"{handle}: #{order} ${amount}", "yes" if wrong > 2 else "no"))
    asked_lines = [f"Message [{n}] {text}" for n, (text, _) in enumerate(answers, start=1)]
    return "Compare.", "\n".join(listed + asked_lines), "\n".join(f"{text} {answer}" for text, answer in answers)


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
    replies = [(system, user, reply.partition(THINK[1])[2] or reply) for system, user, reply in examples]
    texts = [text for system, user, reply in replies for text in (system, user, *[reply] * 5)]
    whole = [f"@{first}_{second} @{first}" for first in language.ADJECTIVES for second in language.ANIMALS[:4]]
    whole += [f"_{word}" for word in language.ANIMALS] * 4
    whole += [f":{word}-{word} {word}" for word in language.SECRET_WORDS] * 3
    whole += [f"#{number:02d} #{number:02d} ${number:02d}" for number in range(100)] * 3
    tokenizer.train_from_iterator(texts + whole * (len(texts) // 10), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.add_tokens(list(THINK), special_tokens=True)
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


STRETCH = ((0.3, 6), (1.0, 20))
"""Longest list of the drills, up to each share of the drill steps."""
Rows = list[tuple[list[int], int]]
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PART_TOKENS = 2048
"""Token positions of one forward pass: few enough for the processor's cache, which is several times faster."""


def padded(rows: Rows) -> Part:
    """Right-padded ids (B, T), flat indices (K,) of the positions that predict a reply token, and those tokens (K,)."""
    width = -(-max(len(tokens) for tokens, _ in rows) // 16) * 16
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    places, targets = [], []
    for k, (tokens, start) in enumerate(rows):
        ids[k, : len(tokens)] = torch.tensor(tokens)
        places += [k * width + i - 1 for i in range(start, len(tokens))]
        targets += tokens[start:]
    return ids, torch.tensor(places), torch.tensor(targets)


def chunks_of(rows: Rows, size: int, rng: random.Random) -> list[list[Part]]:
    """Shuffled batches of ``size`` rows, each in parts of rows of similar length."""
    order = list(rows)
    rng.shuffle(order)
    batches = [sorted(order[i : i + size], key=lambda row: len(row[0])) for i in range(0, len(order) - size + 1, size)]
    chunks = []
    for batch in batches:
        parts, part = [], [batch[0]]
        for row in batch[1:]:
            if (len(part) + 1) * len(row[0]) > PART_TOKENS:
                parts.append(padded(part))
                part = []
            part.append(row)
        chunks.append([*parts, padded(part)])
    return chunks


def losses_of(model: LlamaForCausalLM, ids: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each reply token, shape (K,); right padding: causal attention never sees it."""
    hidden = model.model(ids).last_hidden_state.flatten(0, 1)[places]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), targets, reduction="none")


def measure(model: LlamaForCausalLM, rows: Rows) -> dict[str, float]:
    """On unseen rows, replies teacher-forced: loss a token, share of tokens and of replies that were the likeliest."""
    model.eval()
    loss = right = tokens = whole = 0.0
    with torch.inference_mode():
        for row in rows:
            ids, places, targets = padded([row])
            logits = model.lm_head(model.model(ids).last_hidden_state[0, places])
            hit = logits.argmax(-1) == targets
            right, whole, tokens = right + hit.sum().item(), whole + hit.all().item(), tokens + len(targets)
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    model.train()
    return {"exact": whole / len(rows), "tokens": right / tokens, "reply_loss": loss / tokens}


HEAD = 64
THETA = 1e5
MATCH = 32
"""Size of a head, base of its rotations, and how many of its dimensions turn slowly enough (under 0.004 a token) to
compare what stands hundreds of tokens apart."""


@torch.no_grad()
def begin_with_copying(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """First weights in which copying is there from the beginning: what stood before a token is written beside it (layer
    0), and the next layers look for a place whose "before" is the token at hand and copy what stands there: the two
    halves of an induction head (Olsson et al. 2022, arXiv:2209.11895). Left to chance they take thousands of steps to
    form in a prompt of 230 tokens. Embeddings of one word with and without a space or sign begin near each other.
    """
    width = model.config.hidden_size
    basis = torch.linalg.qr(torch.randn(width, width))[0].T
    constant, before, words = basis[:1], basis[1 : 1 + MATCH], basis[1 + MATCH :]
    std = model.config.initializer_range
    stems: dict[str, torch.Tensor] = {}
    embedding = model.model.embed_tokens.weight
    for token, index in tokenizer.get_vocab().items():
        stem = token.strip('Ġ@_-#:"{},.')
        shared = stems.setdefault(stem, torch.randn(len(words)))
        own = torch.randn(len(words))
        embedding[index] = std * ((0.7**0.5 * shared + 0.3**0.5 * own if stem else own) @ words + 2 * constant[0])
    size = std * width**0.5  # norm of an embedding
    half = HEAD // 2
    slow = torch.cat([torch.arange(half - MATCH // 2, half), torch.arange(HEAD - MATCH // 2, HEAD)])
    turns = THETA ** (-torch.arange(8) * 2 / HEAD)
    for number, layer in enumerate(model.model.layers):
        q, k, v, o = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo")
        o *= 0.1  # what is not set by hand starts as a whisper beside the embeddings
        layer.mlp.down_proj.weight *= 0.1
        heads = range(2) if number == 0 else range(2) if number < 3 else range(1)
        for head in heads:
            at = slice(head * HEAD, (head + 1) * HEAD)
            q[at], k[at], v[at] = 0.005 * torch.randn(3, HEAD, width)
            o[:, at] = 0.003 * torch.randn(width, HEAD)
            if number == 0:  # looks ``head + 1`` tokens back
                for pair, turn in enumerate(turns):
                    angle = turn * (head + 1)
                    k[head * HEAD + pair] += 6 * constant[0]
                    q[head * HEAD + pair] += 6 * torch.cos(angle) * constant[0]
                    q[head * HEAD + half + pair] -= 6 * torch.sin(angle) * constant[0]
                v[at][:MATCH] += words[:MATCH]
                if head == 0:
                    o[:, at][:, :MATCH] += size / width**0.5 * 1.5 * before.T
                else:
                    o[:, at][:, :MATCH] += size / width**0.5 * 0.5 * words[MATCH : 2 * MATCH].T
            else:
                part = words[head * MATCH : head * MATCH + HEAD]
                q[at][slow] += 2.0 * words[:MATCH]
                k[at][slow] += 2.0 * before
                v[at][: len(part)] += part
                o[:, at][:, : len(part)] += size / width**0.5 * part.T


def train(args: argparse.Namespace) -> None:
    random.seed(0)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    first, recitals = bot_play(10_000, 12, loose=0.0)
    drills = [drill(random.Random(f"tokens/{i}")) for i in range(500)]
    tokenizer = make_tokenizer([example for _, example in first] + drills + recitals[:500])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=args.width * 13 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=HEAD,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=args.init,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    begin_with_copying(model, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    held_play, held_recitals = bot_play(20_000, 2)
    held = [encode(tokenizer, example) for _, example in held_play[:160]]
    test_drills = [encode(tokenizer, drill(random.Random(f"held/{i}"), 4)) for i in range(40)]
    test_drills += [encode(tokenizer, drill(random.Random(f"held/{i}"))) for i in range(40)]
    test_recitals = [encode(tokenizer, example) for example in held_recitals[:60]]
    losses = torch.compile(losses_of, dynamic=True) if args.compile else losses_of
    begin, step, round_ = time.time(), args.from_step, args.from_step
    if args.from_step:  # weights only: the moments of an interrupted run are gone
        weights = load_file(Path(args.out) / "model.safetensors")
        known = weights["model.embed_tokens.weight"]
        with torch.no_grad():  # tokens added since then keep their first values
            model.model.embed_tokens.weight[: len(known)] = known
        weights["model.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        model.load_state_dict(weights, strict=False)
    while step < args.steps:
        rng = random.Random(f"round/{round_}")
        play, recitals = bot_play(round_, 8 if step >= args.drill_steps else 1)
        counts = Counter(name for name, _ in play)
        rng.shuffle(recitals)
        if step < args.drill_steps:
            # Copying forms on the shortest lists, within some 200 steps, and is then stretched to a prompt's length.
            longest = next(lines for share, lines in STRETCH if step < share * args.drill_steps)
            rows = [drill(rng, longest) for _ in range(1600)]
        else:
            part = int(len(play) * args.drills)
            rows = [example for _, example in play] + recitals[:part] + [drill(rng) for _ in range(part)]
        size = args.batch if step >= args.drill_steps else 48
        for chunk in chunks_of([encode(tokenizer, example) for example in rows], size, rng):
            warm, left = min(1.0, (step + 1) / 50), min(1.0, 2 * (1 - step / args.steps))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm * (0.03 + 0.97 * left)
            total = sum(len(targets) for _, _, targets in chunk)
            loss = torch.zeros(())
            for part in chunk:
                part_loss = losses(model, *part).sum() / total
                part_loss.backward()
                loss += part_loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 200 == 0 or step == args.steps:
                figures = measure(model, held)
                drilled, recited = measure(model, test_drills), measure(model, test_recitals)
                print(
                    f"step {step} {time.time() - begin:.0f}s loss {loss.item():.3f} play {figures} drills {drilled} "
                    f"recitals {recited}",
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
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--drills", type=float, default=0.25, help="drills, and recitals, a play example")
    parser.add_argument("--drill-steps", type=int, default=300, help="first steps, on nothing but drills")
    parser.add_argument("--init", type=float, default=0.06, help="standard deviation of the first weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--from-step", type=int, default=0, help="go on from the weights in --out")
    parser.add_argument("--compile", action="store_true", help="several times faster; wants a C++ compiler")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
