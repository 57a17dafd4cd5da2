#!/usr/bin/env bash
# Runs the lines of Arbor's README against a server, word for word: readme.sh README. BASE is the server's address in place of the one that
# the README sets. A curl of our own puts ids into the placeholders, out of the answers before, and waits until what was begun has ended.
set -euo pipefail
readme=$1
: "${BASE:?must be the listener for the clients of Arbor}"
declare -A ids=([grant_id]=3f0c2f5e-7a55-4c0b-9a53-0f5a4f6f1d11)
calls=0

# field prints a field of the last answer.
field() { python3 -c 'import json, sys; o = json.loads(sys.stdin.read().strip() or "{}"); print(o.get(sys.argv[1], "") if isinstance(o, dict) else "")' "$1" <<<"$answer"; }

curl() {
	local args=() arg name follow= id
	for arg; do
		for name in "${!ids[@]}"; do arg=${arg//"{$name}"/${ids[$name]}}; done
		[ "$arg" != -N ] || follow=1
		args+=("$arg")
	done
	calls=$((calls + 1))
	if [ -n "$follow" ]; then # a stream has no end: three events are enough
		{ timeout 60 env curl -sS -H 'Last-Event-ID: 0' "${args[@]}" || true; } | grep -m 3 '^event:'
		return
	fi
	answer=$(curl.real -sS --fail-with-body --globoff "${args[@]}" 2>/dev/null) || {
		if grep -q '"message":"vault_ref: ' <<<"$answer"; then # the README's secret is in a Vault
			echo "refused: the server has no Vault that it may read this secret from"
			calls=$((calls - 1))
			return
		fi
		printf '%s\n%s\n' "$*" "$answer" >&2
		return 1
	}
	printf '%.200s\n' "$answer"
	id=$(field workspace_id)
	if [[ $id = ws_* && -z ${ids[ws_id]:-} ]]; then ids[ws_id]=$id; fi # the first one, not its forks
	id=$(field session_id)
	if [[ $id = sess_* ]]; then ids[sess_id]=$id; fi
	id=$(field checkpoint_id)
	if [[ $id = ckpt_* ]]; then ids[ckpt_id]=$id; fi
	id=$(field operation_id)
	if [[ $id = op_* ]]; then wait_for "$id"; fi
}
# wait_for waits for the end of an operation, at most ten minutes.
wait_for() {
	local status=
	for ((i = 0; i < 3000; i++)); do
		status=$(curl.real -sS "$BASE/v1/operations/$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["status"])')
		case $status in
		succeeded) return ;;
		failed) break ;;
		esac
		sleep 0.2
	done
	echo "operation $1 is $status" >&2
	return 1
}
curl.real() { command curl "$@"; }

lines=$(sed -n '/^## API quick reference/,/^## /p' "$readme" | sed -n '/^```bash/,/^```/p' | sed -e '/^```/d' -e '/^BASE=/d')
[ -n "$lines" ] || { echo "$readme has no lines below \"API quick reference\"" >&2; exit 1; }
eval "$lines"
echo "$calls calls were answered"
