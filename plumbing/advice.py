"""What a run in progress should change: how many GPUs to move between serving and training, or a wider gate.

`advice` is pure and looks at two numbers only: how long the trainer waits for data, and how many of
the engines' places the gate leaves empty. Deliberately absent: numpy, state, any action on its own.
"""

# times the throughput: a move that brings less is not worth a restart
WORTH = 1.05
# share of the time: if both sides idle for longer, the gate is what holds them back
IDLE = 0.1


def _below_1(share):
    """A share that one minus it can be divided by."""
    return min(max(share, 0.0), 0.99)


def advice(waits, blocked, serving, training, per_engine=1):
    """One line of advice; "" if there is none that would bring 5%.

    waits: share of its time that the trainer waits for data. blocked: share of the engines' places
    that the gate leaves empty, averaged over time. serving, training: GPUs of each; per_engine: GPUs
    of one engine. Both sides' speed is taken as proportional to their GPUs; the slower one decides.
    """
    waits = _below_1(waits)
    blocked = _below_1(blocked)
    total = serving + training
    # what one GPU would do unhindered, in units of the present throughput of all
    engine_rate = 1 / (1 - blocked) / serving
    trainer_rate = 1 / (1 - waits) / training
    now = min(serving * engine_rate, training * trainer_rate)
    best = serving
    most = now
    for serve in range(per_engine, total, per_engine):
        train = total - serve
        rate = min(serve * engine_rate, train * trainer_rate)
        if rate > most:
            best = serve
            most = rate
    waiting = f"trainer waits {waits:.0%} of the time"
    empty = f"the gate keeps {blocked:.0%} of the engines' places empty"
    if most >= WORTH * now:
        reason = waiting
        way = "from training to serving"
        moved = best - serving
        if moved < 0:
            reason = empty
            way = "from serving to training"
            moved = -moved
        gpus = "GPU" if moved == 1 else "GPUs"
        split = f"({best} serve, {total - best} train)"
        gain = most / now
        return f"{reason}: move {moved} {gpus} {way} {split}, about {gain:.2f} times the throughput"
    if waits > IDLE and blocked > IDLE:
        return f"{waiting} while {empty}: raise --max_lag"
    return ""


class Balance:
    """Looks at a run's steps and says what to change, once every 50 of them."""

    def __init__(self, config):
        self.config = config
        self.waits = []
        self.blocked = []

    def look(self, waits, blocked):
        """Take one step: share of it that waited for data, share of the engines' places empty."""
        self.waits.append(waits)
        self.blocked.append(blocked)
        if len(self.waits) < 50:
            return
        c = self.config
        words = advice(
            sum(self.waits) / len(self.waits),
            sum(self.blocked) / len(self.blocked),
            c.engines * c.tensor_parallel,
            c.trainers,
            c.tensor_parallel,
        )
        self.waits = []
        self.blocked = []
        if words:
            print(f"train: over the last 50 steps, {words}", flush=True)
