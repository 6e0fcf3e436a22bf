"""Service: the tokens that each tenant has had of an engine."""

from collections import defaultdict


class Service:
    """Counts tokens by tenant number (`Rows.tenant_number`). Costs nothing while rows only draw.

    Tokens that a running row has drawn are counted when it leaves; until then they are in `Rows`. `Rows` writes all
    but `lifted`, which a policy writes by `lift`.

    Attributes:
        input: Tokens of admitted sequences, each once, also where a prefix cache had them.
        output: Tokens drawn by rows that have left.
        lifted: Service that counts without having been given, in the policy's own measure.
        last: Tenant of the sequence that was last admitted for the first time; None before.
    """

    def __init__(self) -> None:
        self.input: defaultdict[int, int] = defaultdict(int)
        self.output: defaultdict[int, int] = defaultdict(int)
        self.lifted: defaultdict[int, float] = defaultdict(float)
        self.last: str | None = None

    def admit(self, tenant: str, number: int, tokens: int) -> None:
        """Counts a sequence that gets its first row, with all the tokens that it has by then."""
        self.input[number] += tokens
        self.last = tenant

    def leave(self, number: int, tokens: int) -> None:
        """Counts the tokens that a row has drawn."""
        self.output[number] += tokens

    def lift(self, number: int, by: float) -> None:
        self.lifted[number] += by
