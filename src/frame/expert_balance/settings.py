"""Settings of expert balance: which slots the devices have for experts, and when experts move between them."""

from __future__ import annotations

from collections.abc import Iterator

from frame.core.config.section import Section, setting
from frame.quoting import quoted


class ExpertBalanceConfig(Section):
    """Moving experts between the devices that share them, by how many tokens they get."""

    enable_eplb: bool = setting(
        False, "Balance experts between the devices that share them, see docs/expert-balance.md."
    )
    num_redundant_experts: int = setting(
        0, "Slots of each layer beside one an expert, for replicas of experts that get many tokens.", ge=0, le=1 << 16
    )
    expert_balancer: str = setting(
        "auto", "Expert balancer plugin, which places experts by their loads; auto: the preferred one."
    )
    eplb_window_size: int = setting(1000, "Steps whose tokens count when experts are placed.", ge=1, le=1 << 31)
    eplb_step_interval: int = setting(3000, "Steps from one placement of experts to the next.", ge=1, le=1 << 31)
    eplb_use_async: bool = setting(
        True, "Place and move experts beside the steps, a layer at a time; else all at once, between two steps."
    )
    eplb_rows_per_step: int = setting(
        1, "Most experts that a device sends, and receives, during a step while experts move.", ge=1, le=1 << 16
    )
    eplb_log_balancedness: bool = setting(False, "Log how evenly tokens are spread over devices at each placement.")
    eplb_record: str | None = setting(
        None, "File, an absolute path, to which the loads of experts are written for `frame eplb simulate`."
    )

    def contradictions(self) -> Iterator[str]:
        if self.num_redundant_experts and not self.enable_eplb:
            yield f"num_redundant_experts {self.num_redundant_experts} needs enable_eplb, which places them"
        if self.eplb_record is not None and not self.enable_eplb:
            yield f"eplb_record {quoted(self.eplb_record)} needs enable_eplb, which counts the loads"
        if self.eplb_record is not None and not self.eplb_record.startswith("/"):
            yield f"eplb_record must be an absolute path, got {quoted(self.eplb_record)}"
