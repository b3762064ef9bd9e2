"""To how many devices a token goes, whose experts are spread over them.

A router chooses k of E experts, all alike likely. If it first limits itself to g of G equal groups of experts (DeepSeek-V3: 4
of 8), it chooses k among those of the groups. Of ``parts`` equal parts of the experts, a token reaches in the mean

    parts (1 - sum_j P(j) C(g E/G - (groups j in the part) E/G, k) / C(g E/G, k))

where j of the groups in a part are among the g with the hypergeometric probability P(j); parts smaller than a group are reached
if their group is chosen, and one of their experts. Without groups this is parts (1 - C(E - E/parts, k) / C(E, k)).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Routing:
    """``chosen`` of ``count`` experts, all of them in ``kept`` of ``groups`` equal groups."""

    count: int
    chosen: int
    groups: int = 1
    kept: int = 1

    def reached(self, parts: int) -> float:
        """Mean number of ``parts`` equal parts of the experts in which a token has one of its own. Groups that parts cut across
        are taken to limit nothing.

        >>> Routing(4, 2).reached(4), Routing(4, 1).reached(2), round(Routing(256, 8, 8, 4).reached(8), 2)
        (2.0, 1.0, 3.63)
        """
        size, group = self.count // parts, self.count // self.groups
        if self.groups > 1 and parts % self.groups and self.groups % parts:
            return Routing(self.count, self.chosen).reached(parts)
        open_ = self.kept * group
        if size <= group:
            missed = comb(open_ - size, self.chosen) / comb(open_, self.chosen)
            return parts * self.kept / self.groups * (1.0 - missed)
        inside = self.groups // parts
        missed = sum(
            comb(inside, j) * comb(self.groups - inside, self.kept - j) / comb(self.groups, self.kept)
            * comb(open_ - j * group, self.chosen) / comb(open_, self.chosen)
            for j in range(min(inside, self.kept) + 1)
        )
        return parts * (1.0 - missed)
