"""Credit turns the reward of an episode into an advantage for each token that the policy sampled. One file per kind, behind one
dictionary.

`none` takes the reward as it is. `leave_one_out`, `group` and `ema` subtract a baseline from it, and give all tokens of an episode
the result. `critic` learns the value of every state, and gives each token an advantage of its own (`gae`).
"""

CREDITS: dict[str, str] = {
    "critic": "opd.credit.critic:CriticCredit",
    "leave_one_out": "opd.credit.leave_one_out:LeaveOneOut",
    "group": "opd.credit.group:GroupCredit",
    "ema": "opd.credit.ema:EmaCredit",
    "none": "opd.credit.none:NoBaselineCredit",
}
"""Kind -> its class, which implements `opd.credit.interfaces.Credit`; `opd.settings.user_objects.import_object` imports it."""
