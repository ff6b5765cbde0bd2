"""An exact model of the scheduler and of its cache: what each plan must be, block by block.

It hears the same events as the scheduler (arrivals, results, ends, lost steps), keeps an account of
its own, and predicts every plan and all that the scheduler holds after it. It searches where the
scheduler calculates: places that a window sees are counted one by one, kept blocks are found by
walking through a list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.request.request import Request, Status


@dataclass(eq=False)
class Kept:
    """A block of tokens that was kept after another one; `blocks` per group, 0 where it left."""

    before: Kept | None
    tokens: tuple[int, ...]
    blocks: list[int]


@dataclass
class Pool:
    """The blocks of one group."""

    num_blocks: int
    window: int
    readers: dict[int, int] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)  # longest idle first
    kept: dict[int, Kept] = field(default_factory=dict)

    @property
    def free(self):
        return [
            i for i in range(1, self.num_blocks) if i not in self.readers and i not in self.idle
        ]

    @property
    def num_free(self):
        return self.num_blocks - 1 - len(self.readers)


@dataclass(eq=False)
class Account:
    """What is known of one request."""

    request: Request
    number: int
    status: Status = Status.WAITING
    row: int = -1
    computed: int = 0
    committed: int = 0
    items_planned: int = 0
    items_done: int = 0
    flights: list = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    last: Kept | None = None
    num_kept: int = 0
    leader: Account | None = None
    leader_blocks: int = 0
    cached: int = 0

    @property
    def turn(self):
        return self.request.priority, self.number

    @property
    def ahead(self):
        return sum(part["drafts"] + part["samples"] for part in self.flights)

    @property
    def bound(self):
        return self.request.num_tokens + self.ahead

    @property
    def items(self):
        return () if self.request.score is None else self.request.score.items

    @property
    def is_chunk(self):
        return self.request.score is not None or self.bound - self.computed > 1

    @property
    def end(self):
        return len(self.request.prompt_token_ids) + self.request.max_tokens


class Oracle:
    """Follows a scheduler's calls and says what it must answer."""

    def __init__(self, cache, max_num_seqs, budget, least_computed, spare_places):
        self.size, self.budget = cache.block_size, budget
        self.keeps = cache.keeps_prefixes
        self.pools = [Pool(group.num_blocks, group.window) for group in cache.groups]
        self.least_computed = least_computed
        self.spare_places = spare_places  # None: nothing drafts
        self.rows = set(range(max_num_seqs))
        self.accounts: dict[Request, Account] = {}
        self.table: list[Kept] = []
        self.unsound = [set() for _ in self.pools]
        self.num_preemptions = self.queries = self.hits = self.step_id = 0

    def queue(self, status):
        found = [a for a in self.accounts.values() if a.status is status]
        return sorted(found, key=lambda account: account.turn)

    # Events

    def add(self, request):
        self.accounts[request] = Account(request, len(self.accounts))

    def commit(self, request, is_unsound, new_token_ids):
        account = self.accounts[request]
        part = account.flights.pop(0)
        right = part["query"] + part["drafts"]
        if part["drafts"]:
            wrong = part["drafts"] + 1 - len(new_token_ids)
            account.computed -= wrong
            right -= wrong
        account.committed += right
        account.items_done += len(part["items"])
        if account.status is Status.FINISHED:
            if not account.flights:
                self.release(account)
        elif not is_unsound:
            self.keep(
                account, [*request.prompt_token_ids, *request.output_token_ids, *new_token_ids]
            )
            for group, pool in enumerate(self.pools):
                unseen = [
                    i for i, block in enumerate(account.held[group])
                    if block and not self.sees(pool, account.committed, i)
                ]  # fmt: skip
                self.give_back(pool, [account.held[group][i] for i in unseen])
                for i in unseen:
                    account.held[group][i] = 0

    def withdraw(self, plan):
        for planned in plan.scheduled:
            account = self.accounts[planned.request]
            account.flights.pop(0)
            if not account.flights:
                if account.status is Status.RUNNING:
                    self.preempt(account)
                else:
                    self.release(account)
        for blocks, lost in zip(self.unsound, plan.unsound_blocks, strict=True):
            blocks.update(lost)

    def finish(self, request):
        account = self.accounts[request]
        if account.status is Status.RUNNING and not account.flights:
            self.release(account)
        account.status, account.leader = Status.FINISHED, None

    # Blocks

    def sees(self, pool, place, index):
        """Whether the token at `place`, or a later one, sees a token of block `index`."""
        inside = range(index * self.size, (index + 1) * self.size)
        return not pool.window or any(place - pool.window < i for i in inside)

    def blocks_for(self, num_tokens):
        return len(range(0, num_tokens, self.size))

    def take(self, pool):
        if pool.free:
            block = min(pool.free)
        else:
            block = pool.idle.pop(0)
            self.forget(pool, block)
        pool.readers[block] = 1
        return block

    def forget(self, pool, block):
        entry = pool.kept.pop(block)
        entry.blocks[self.pools.index(pool)] = 0
        lacks_what_all_need = any(
            not pool.window and not block
            for pool, block in zip(self.pools, entry.blocks, strict=True)
        )
        if entry in self.table and (lacks_what_all_need or not any(entry.blocks)):
            self.table.remove(entry)

    def give_back(self, pool, blocks):
        for block in reversed([block for block in blocks if block]):
            pool.readers[block] -= 1
            if not pool.readers[block]:
                del pool.readers[block]
                if block in pool.kept:
                    pool.idle.append(block)

    def can_grow(self, account, num_tokens):
        need = self.blocks_for(num_tokens)
        return all(
            need - len(held) <= pool.num_free
            for pool, held in zip(self.pools, account.held, strict=True)
        )

    def grow(self, account, num_tokens):
        for pool, held in zip(self.pools, account.held, strict=True):
            while len(held) < self.blocks_for(num_tokens):
                held.append(self.take(pool))

    def release(self, account):
        request = account.request
        if request.is_unsound or request.has_unsound_draft:
            for pool, held, unsound in zip(self.pools, account.held, self.unsound, strict=True):
                for block in filter(None, held):
                    if block in pool.kept:
                        self.forget(pool, block)
                    if pool.readers[block] == 1:
                        unsound.add(block)
        for pool, held in zip(self.pools, account.held, strict=True):
            self.give_back(pool, held)
        self.rows.add(account.row)
        account.held, account.row, account.last, account.num_kept = [], -1, None, 0
        account.computed = account.committed = 0
        account.items_planned = account.items_done

    def preempt(self, account):
        self.num_preemptions += 1
        self.release(account)
        account.status = Status.WAITING

    def keep(self, account, tokens):
        while self.keeps and (account.num_kept + 1) * self.size <= account.committed:
            start = account.num_kept * self.size
            own = tuple(tokens[start : start + self.size])
            entry = self.following(account.last, own)
            if entry is None:
                entry = Kept(account.last, own, [0] * len(self.pools))
                self.table.append(entry)
            for group, pool in enumerate(self.pools):
                block = account.held[group][account.num_kept]
                if block and not entry.blocks[group]:
                    entry.blocks[group] = block
                    pool.kept[block] = entry
            account.last, account.num_kept = entry, account.num_kept + 1
        if not self.keeps:
            account.num_kept = account.committed // self.size

    def following(self, before, tokens):
        found = [e for e in self.table if e.before is before and e.tokens == tokens]
        assert len(found) <= 1
        return found[0] if found else None

    def most_cached(self, account):
        request = account.request
        return request.num_tokens - (0 if account.items else self.least_computed)

    def find(self, account):
        """The entries of the longest kept start, as far as it may be taken."""
        tokens = [*account.request.prompt_token_ids, *account.request.output_token_ids]
        entries = []
        while not account.request.reads_prompt and len(tokens) >= (
            len(entries) * self.size + self.size
        ):
            stop = (len(entries) + 1) * self.size
            entry = self.following(
                entries[-1] if entries else None, tuple(tokens[stop - self.size : stop])
            )
            if entry is None or stop > self.most_cached(account):
                break
            entries.append(entry)
        while entries and any(
            self.sees(pool, len(entries) * self.size, i) and not entry.blocks[group]
            for group, pool in enumerate(self.pools)
            for i, entry in enumerate(entries)
        ):
            entries.pop()
        return entries

    def matched(self, entries, group):
        pool, place = self.pools[group], len(entries) * self.size
        return [e.blocks[group] if self.sees(pool, place, i) else 0 for i, e in enumerate(entries)]

    # Plans

    def plan(self):
        """What the next plan holds: (account, part) in its order."""
        planned, budget, sits_out = [], self.budget, set()
        is_verifying = self.spare_places is not None and any(
            account.request.next_drafts for account in self.queue(Status.RUNNING)
        )
        running = self.queue(Status.RUNNING)
        answers = [account for account in running if not account.is_chunk]
        others = [account for account in running if account.is_chunk]
        spare = self.spare(answers, others) if is_verifying else 0
        for place, account in enumerate([*answers, *others]):
            if not budget or account.status is not Status.RUNNING or account in sits_out:
                continue
            if not self.may_run(account):
                continue
            share = -(-spare // max(1, len(answers) - place))
            part = self.part(account, budget, share if is_verifying else 0)
            if not part["tokens"]:
                continue
            if part["drafts"] and not self.can_grow(account, self.places(account, part)):
                part = self.part(account, budget, 0)
            if self.reserve(account, self.places(account, part), planned, sits_out):
                planned.append((account, part))
                budget -= part["tokens"]
                spare -= part["drafts"]
        self.admit(planned)
        for account, part in planned:
            account.flights.append(part)
            account.computed += part["query"] + part["drafts"]
            account.items_planned += len(part["items"])
        self.step_id += bool(planned)
        return planned

    def admit(self, planned):
        budget = self.budget - sum(part["tokens"] for _, part in planned)
        for account in self.queue(Status.WAITING):
            if budget <= 0 or not self.rows:
                return
            leader, account.leader = account.leader, None
            if (
                leader
                and leader.status is Status.RUNNING
                and leader.num_kept < account.leader_blocks
            ):
                account.leader = leader
                continue
            entries = self.find(account)
            if self.waits_for_another(account, entries):
                continue
            if not self.fits(account, entries, budget):
                return
            self.enter(account, entries)
            part = self.part(account, budget, 0) | {"enters": True}
            self.grow(account, self.places(account, part))
            planned.append((account, part))
            budget -= part["tokens"]

    def waits_for_another(self, account, entries):
        if not self.keeps or account.request.reads_prompt:
            return False
        tokens = [*account.request.prompt_token_ids, *account.request.output_token_ids]
        tokens = tokens[: max(0, self.most_cached(account))]
        for other in self.queue(Status.RUNNING):
            if other.last is not (entries[-1] if entries else None):
                continue
            if other.num_kept != len(entries):
                continue
            others = [*other.request.prompt_token_ids, *other.request.output_token_ids]
            count = len(entries)
            while True:
                stop = (count + 1) * self.size
                if stop > min(len(tokens), len(others)) or tokens[:stop] != others[:stop]:
                    break
                count += 1
            if count > len(entries):
                account.leader, account.leader_blocks = other, count
                return True
        return False

    def fits(self, account, entries, budget):
        request = account.request
        has_items_alone = account.items and len(entries) * self.size == request.num_tokens
        if has_items_alone and len(account.items[account.items_planned]) > budget:
            return False
        places = min(request.num_tokens + 1 + (self.spare_places or 0), account.end)
        for group, pool in enumerate(self.pools):
            need = self.blocks_for(places) - len(entries)
            shared = [block for block in self.matched(entries, group) if block]
            if pool.window:
                start = len(entries) * self.size
                first = min(request.num_tokens, start + budget) + (self.spare_places or 0)
                # A window's tokens, the first of which is the last one of a block.
                window = 1 + self.blocks_for(pool.window - 1)
                need = max(
                    self.blocks_for(min(first, places)) - len(entries),
                    min(need, window - len(shared)),
                )
            if need > pool.num_free - sum(block in pool.idle for block in shared):
                return False
        return True

    def enter(self, account, entries):
        request = account.request
        account.status, account.row = Status.RUNNING, min(self.rows)
        self.rows.remove(account.row)
        account.held = [self.matched(entries, group) for group in range(len(self.pools))]
        for pool, held in zip(self.pools, account.held, strict=True):
            for block in filter(None, held):
                if block in pool.idle:
                    pool.idle.remove(block)
                pool.readers[block] = pool.readers.get(block, 0) + 1
        account.last, account.num_kept = (entries[-1] if entries else None), len(entries)
        account.computed = account.committed = len(entries) * self.size
        if not request.output_token_ids and not account.items_done:
            account.cached = account.computed
            self.queries += request.num_tokens
            self.hits += account.computed

    def may_run(self, account):
        request = account.request
        if account.flights and (request.params.bad_words or request.matcher):
            return False
        if request.score is not None:
            return account.computed < len(request.prompt_token_ids) or account.items_planned < len(
                account.items
            )
        return (
            not account.ahead or len(request.output_token_ids) + account.ahead < request.max_tokens
        )

    def spare(self, answers, others):
        most = self.budget - len(answers)
        longest = max(
            (len(a.items[a.items_planned]) for a in others if a.items_planned < len(a.items)),
            default=0,
        )
        has_prompts = bool(others or self.queue(Status.WAITING))
        return max(0, min(most // 2 if has_prompts else most, most - longest))

    def part(self, account, budget, most_drafts):
        request = account.request
        missing = account.bound - account.computed
        query, drafts, first = min(missing, budget), 0, account.items_planned
        left, stop = budget - query, first
        while stop < len(account.items) and len(account.items[stop]) <= left:
            left -= len(account.items[stop])
            stop += 1
        is_last = query == missing
        is_answer = request.score is None and is_last and query == 1
        if is_answer and account.computed >= len(request.prompt_token_ids):
            drafts = max(0, min(request.draft_limit, account.end - account.bound - 1, most_drafts))
            if request.needs_last_token:
                drafts = min(drafts, len(request.next_drafts))
        items = range(first, stop)
        return {
            "start": account.computed, "query": query, "drafts": drafts, "items": items,
            "samples": is_last and request.score is None, "enters": False,
            "tokens": query + drafts + sum(len(account.items[i]) for i in items),
        }  # fmt: skip

    def places(self, account, part):
        stop = part["start"] + part["query"] + part["drafts"]
        if self.spare_places is None or not (part["samples"] and account.request.draft_limit):
            return stop
        return max(stop, min(stop + self.spare_places, account.end))

    def reserve(self, account, places, planned, sits_out):
        while not self.can_grow(account, places):
            last = self.queue(Status.RUNNING)[-1]
            planned[:] = [entry for entry in planned if entry[0] is not last]
            if last.flights:
                sits_out.add(last)
                return False
            self.preempt(last)
            if last is account:
                return False
        self.grow(account, places)
        return True
