"""What Schemathesis must know of the API besides its contract, and a check that all of it takes part in.

OpenAPI 3.0 describes each field, but not rules between fields, and not what only this server can know. The contract says these rules in words.
RULES lists them: the refusals of data that is valid by the schema. The server must accept everything else. Schemathesis counts 401, 403, 404, 409
and 429 as accepted, too: a refusal for the sake of a right, a state or a rate says nothing of the data.

COPPICE_RULES is a file that gets the number of each rule when it first matches; `python hooks.py FILE` fails if a rule is not there.
"""

import os
import re
import sys
import uuid

BETWEEN_FIELDS = "a rule between fields, which the description of the field says"
OPAQUE = "an opaque text that only the server makes"
SETTING = "the server of this test has no store, no previews, and no runners from elsewhere"

# The operation, and what the refusal says, as regular expressions.
RULES = [
    (r".*", r"^cursor: it is not a next_cursor", OPAQUE),
    (r".*", r"^(no store is configured|this server serves no previews|this controller takes no runners)", SETTING),
    (r"GET /v1/attach/.*", r"^Upgrade: this route speaks WebSocket only", "a WebSocket"),
    (r".*", r"^on_idle: it needs idle_seconds", BETWEEN_FIELDS),
    (r"PUT .*/files$", r"^the archive cannot be read", "the body is a tar archive, which no schema describes"),
    (r".*/files$", r"^list: only one of list,? ", BETWEEN_FIELDS),
    (r"PATCH /v1/projects/.*", r"^key_version: the project does not encrypt", BETWEEN_FIELDS),
    (r".*/(prune|retention)$", r"^the policy needs at least one of", BETWEEN_FIELDS),
    (r"POST .*/(fork|restore)$", r"^grants: it must be inherit, none, or a list of ids of grants", "a text or a list: the description says which"),
    (r".*", r": it holds a NUL character$", "no text has a NUL: the description of the API says so"),
    (r"GET .*/diff$", r"^to: .* only checkpoints of one tree can be compared", BETWEEN_FIELDS),
    (r"PATCH /v1/workspaces/.*", r"^network.allow: it replaces all entries", BETWEEN_FIELDS),
    (r"POST .*/exec$", r"^wait: it cannot be true together with pty", BETWEEN_FIELDS),
    (r".*", r"is not an id of the form ", "an id has the bits of a UUID, which no pattern describes"),
    (r".*", r"^network\.(allow|add|remove)\[", "a host, a bundle or a range: more than a pattern says"),
    (r"POST .*/ports$", r"^listen: it must be ip:port or :port", "an address: more than a pattern says"),
    (r".*/watches$", r"^path: ~ is the home of a user: name one in user", BETWEEN_FIELDS),
    (r".*", r"^(labels|env): .* is not (a label key|the name of an environment variable)", "a rule for the keys of an object, which OpenAPI 3.0 cannot say"),
    (r"POST .*/step$", r"^actions\.\d+: it has neither a command nor files", BETWEEN_FIELDS),
    (r"POST .*/step$", r"^actions\.\d+\.(stdin_base64|files\.\d+\.content_base64): ", BETWEEN_FIELDS),
    (r"POST .*/step$", r"^actions\.\d+\.command.0: the program's name is empty", "a rule for the first of a list"),
    (r"POST .*/step$", r"^(actions\.\d+\.(checkpoint\.)?)?(labels|env): .* is not (a label key|the name of an environment variable)", "a rule for the keys of an object, which OpenAPI 3.0 cannot say"),
    (r"POST .*/exec$", r"^stdin_base64: it cannot be given together with stdin", BETWEEN_FIELDS),
    (r"POST .*/exec$", r"^cols: cols and rows need pty", BETWEEN_FIELDS),
    (r"POST .*/ports$", r"^ttl_seconds: it is for a preview", BETWEEN_FIELDS),
    (r"POST .*/exec$", r"^command.0: the program's name is empty", "a rule for the first of a list"),
    (r"POST .*/ports$", r"^listen: a preview has no address", BETWEEN_FIELDS),
    (r".*/files(/.*)?$", r": ~ is the home of a user: name one in user", BETWEEN_FIELDS),
    (r"GET .*/files$", r"^path: \S+ is a (dir|file)", "what the path names decides"),
    (r"PUT .*/grants/.*", r"^(allowed_hosts|env|paths|vault_ref|base_url_env|base_url_path|header|secret|methods): ", "names of hosts, headers and secrets follow rules that no pattern has room for"),
]

matched = set()


def rule_for(operation, body):
    """The number of the rule that a refusal is by, or None."""
    says = body.get("detail") if isinstance(body, dict) else None
    if not isinstance(says, str):
        return None
    return next((n for n, (who, text, _) in enumerate(RULES) if re.fullmatch(who, operation) and re.search(text, says)), None)


def note(number):
    path = os.environ.get("COPPICE_RULES")
    if path and number not in matched:
        matched.add(number)
        with open(path, "a") as file:
            file.write(f"{number}\n")


def unmatched(path):
    """The rules that no run has noted in a file."""
    with open(path) as file:
        seen = {int(line) for line in file}
    return [RULES[n][:2] for n in range(len(RULES)) if n not in seen]


if __name__ == "__main__":
    left = unmatched(sys.argv[1])
    for operation, text in left:
        print(f"test-api: no refusal matched the rule {operation} {text}; if the run was long enough, remove it from scripts/api/hooks.py", file=sys.stderr)
    sys.exit(bool(left))

import schemathesis  # noqa: E402  the lines above need none
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402


@schemathesis.check
def valid_input_is_taken(ctx, response, case):
    """positive_data_acceptance, but for the rules above."""
    try:
        return positive_data_acceptance(ctx, response, case)
    except AssertionError as refusal:
        try:
            body = response.json()
        except ValueError:
            raise refusal from None
        rule = rule_for(case.operation.label, body)
        if rule is None:
            raise
        note(rule)
        return None


@schemathesis.hook
def before_call(ctx, case, kwargs):
    """A key belongs to one request, and Schemathesis would use the same few for many. A stream that follows has no end."""
    if case.query and "follow" in case.query:
        case.query["follow"] = "false"
    headers = case.headers
    if headers and "Idempotency-Key" in headers and case.meta is not None and case.meta.generation.mode.is_positive:
        headers["Idempotency-Key"] = str(uuid.uuid4())
