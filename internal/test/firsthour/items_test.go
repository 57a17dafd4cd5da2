package firsthour

import (
	"strings"
	"testing"
)

// try is a line that a user types, and what must come of it.
type try struct {
	line   string
	keys   []press
	status int
	says   []string // texts that it must print
	not    []string // texts that it must not print
}

// item is a thing that new users stumbled over, by its number in issue 22.
type item struct {
	name  string
	setup []string
	tries []try
}

// items runs them on one set of machines.
func (u *user) items(t *testing.T) {
	t.Helper()
	for _, x := range items {
		if !chosen(x.name) {
			continue
		}
		t.Run(x.name, func(t *testing.T) {
			for _, line := range x.setup {
				u.must(t, line)
			}
			for _, y := range x.tries {
				u.try(t, y)
			}
			u.clear(t)
		})
	}
	if chosen("07-ctrl-c-of-dev") {
		t.Run("07-ctrl-c-of-dev", func(t *testing.T) { u.restart(t) })
	}
}

func (u *user) try(t *testing.T, y try) {
	t.Helper()
	status, text := u.run(t, y.line, y.keys...)
	if status != y.status {
		t.Errorf("%s: status %d, want %d:\n%s", y.line, status, y.status, text)
	}
	for _, want := range y.says {
		if !strings.Contains(text, want) {
			t.Errorf("%s does not print %q:\n%s", y.line, want, text)
		}
	}
	for _, bad := range y.not {
		if strings.Contains(text, bad) {
			t.Errorf("%s prints %q:\n%s", y.line, bad, text)
		}
	}
}

// restart ends the server with Ctrl-C and starts it again: machines are suspended, and resumed.
func (u *user) restart(t *testing.T) {
	t.Helper()
	u.must(t, demo)
	u.must(t, "coppice ws exec demo -- sh -c 'echo kept > /run/kept'") // in memory
	status, said := u.stop(t)
	if status != 0 || !strings.Contains(said, "suspend") {
		t.Errorf("after Ctrl-C coppice dev ends with status %d and says:\n%s", status, said)
	}
	u.try(t, try{line: "coppice ws ls", status: 1, says: []string{"start one with `coppice dev`"}})
	u.try(t, try{line: "coppice context ls", says: []string{"context"}, not: []string{"http://127.0.0.1"}})
	u.start(t)
	u.try(t, try{line: "coppice ws ls", says: []string{"suspended"}})
	u.try(t, try{line: "coppice ws exec demo -- true", status: 75, says: []string{"suspended", "resume"}})
	u.must(t, "coppice ws resume demo")
	u.try(t, try{line: "coppice ws exec demo -- cat /run/kept", says: []string{"kept"}})
	u.must(t, "coppice ws suspend demo")
	u.must(t, "coppice ckpt create demo --name x || coppice restore $(coppice --json ws show demo | jq -r .checkpoint_id) --in demo")
	if status, said := u.stop(t); status != 0 {
		t.Errorf("the second Ctrl-C: status %d:\n%s", status, said)
	}
}

var items = []item{
	{name: "01-tar-of-everything", setup: []string{demo}, tries: []try{
		{line: "coppice ws cp demo:/proc all", status: 75, says: []string{"pseudo file system"}},
		{line: "coppice ws cp demo:/sys/kernel all", status: 75, says: []string{"pseudo file system"}},
		{line: "coppice ws exec demo -- mount --bind /proc /mnt && coppice ws exec demo -- mkdir -p /srv/x && coppice ws cp demo:/srv srv", says: []string{" in "}},
		{line: "coppice ws cp demo:/etc etc", says: []string{"were left out"}},
		{line: "rm -rf etc srv"},
	}},
	{name: "02-listen-everywhere", tries: []try{
		{line: "coppice dev --data-dir other --listen 0.0.0.0:7196", status: 65, says: []string{"--plain-http", "without TLS"}},
		{line: "test ! -e other"},
	}},
	{name: "03-contexts", tries: []try{
		{line: "coppice context ls", says: []string{"*", "dev", "http://127.0.0.1:"}},
		{line: "coppice --server http://127.0.0.1:9 ws ls", status: 69, says: []string{"no server answers at http://127.0.0.1:9", "coppice dev"}},
		{line: "coppice context use nope", status: 65, says: []string{"nope", "context ls"}},
	}},
	{name: "04-port-taken", tries: []try{
		{line: "coppice dev --data-dir other --listen ${SERVER#http://}", status: 78, says: []string{"another program listens on 127.0.0.1:", "--listen"}},
		{line: "mount | grep -c \"$PWD/other\"; ls other", status: 2, not: []string{"postgres"}},
	}},
	{name: "05-forward-to-loopback", setup: []string{demo}, tries: []try{
		{line: "coppice ws exec -d demo -- python3 -m http.server --bind 127.0.0.1 8000"},
		{line: "coppice ws exec --timeout 60s demo -- bash -c 'until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.2; done'"},
		{line: "coppice ws forward demo 0:8000 > at & until grep -q demo at; do sleep 0.1; done; curl -sS http://$(cut -d' ' -f1 at)/ | grep -c 'Directory listing'; kill -INT %1; wait", says: []string{"2"}},
		{line: "coppice ws forward demo 0:8001 > at & until grep -q demo at; do sleep 0.1; done; sleep 1; kill -INT $!; wait", says: []string{"no program in the workspace listens on port 8001"}},
	}},
	{name: "08-flags-of-exec", setup: []string{demo}, tries: []try{
		{line: "coppice ws exec demo -u nobody -- id -un", says: []string{"nobody"}},
		{line: "coppice ws exec -u nobody demo -- id -un", says: []string{"nobody"}},
		{line: "coppice ws exec demo id -un", says: []string{"root"}},
		{line: "coppice ws exec demo -- sh -c 'exit 7'", status: 7},
		{line: "coppice --json ws exec demo -- sh -c 'exit 7' | jq .exit_code", says: []string{"7"}},
		{line: "coppice ws exec demo -- nothing-like-it", status: 127, says: []string{"COMMAND_NOT_FOUND"}},
	}},
	{name: "09-pty-over-rest", setup: []string{demo}, tries: []try{
		{line: `curl -sS -m 60 -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d '{"command":["sh"],"pty":true,"wait":true}' $SERVER/v1/workspaces/$(coppice --json ws show demo | jq -r .id)/exec | jq -c .code`, says: []string{"INVALID_FIELD"}},
		{line: `curl -sS -m 60 -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d '{"command":["sh"],"pty":true}' $SERVER/v1/workspaces/$(coppice --json ws show demo | jq -r .id)/exec | grep -c sess_`, says: []string{"1"}},
	}},
	{name: "10-interrupts", setup: []string{demo, "coppice ws exec demo -- dd if=/dev/zero of=/srv/big bs=1M count=600 conv=sparse"}, tries: []try{
		{line: "coppice fork demo -n 8 --name ctl & sleep 0.5; kill -INT $!; wait $!", status: 130, says: []string{"the server goes on", "coppice op"}},
		{line: "coppice op ls --all", says: []string{"fork_workspace"}},
		{line: "coppice op cancel nope", status: 65, says: []string{"coppice op ls"}},
		{line: "coppice ws exec demo -- sleep 1000 & sleep 2; kill -INT $!; wait $!", status: 130, says: []string{"press Ctrl-C again"}},
		{line: "coppice ws cp demo:/srv/big big & sleep 1; kill -INT $!; wait $!", status: 130},
		{line: "test ! -e big && ls -A | grep -c big", status: 1, says: []string{"0"}},
	}},
	{name: "11-messages", setup: []string{demo}, tries: []try{
		{line: "coppice ws create --ttl -5m", status: 2, says: []string{"negative", "Try 'coppice ws create --help'"}},
		{line: "coppice ws create --ttl 5x", status: 2, says: []string{"90s, 30m or 24h"}},
		{line: "coppice ws create --allow http://example.com", status: 2, says: []string{"--allow example.com:80"}},
		{line: "coppice ws create a b c", status: 2, says: []string{"takes no argument"}},
		{line: "coppice ws show", status: 2, says: []string{"usage: coppice ws show WORKSPACE"}},
		{line: "coppice ws show a b", status: 2, says: []string{"usage: coppice ws show WORKSPACE"}},
		{line: "coppice ws rm", status: 2, says: []string{"name a workspace"}},
		{line: "coppice ws shwo", status: 2, says: []string{`did you mean "coppice ws show"?`}},
		{line: "coppice ws lss", status: 2, says: []string{`did you mean "coppice ws ls"?`}},
		{line: "coppice frok", status: 2, says: []string{`did you mean "coppice fork"?`}},
		{line: "coppice fork demo -n many", status: 2, says: []string{"many"}},
		{line: "coppice fork demo -n 0", status: 65, says: []string{"count"}},
		{line: "coppice ws create --memory lots", status: 2, says: []string{"lots"}},
		{line: "coppice ws create --name demo", status: 75, says: []string{"exists already"}},
		{line: "coppice ws create --image nope", status: 66, says: []string{"nope"}},
		{line: "coppice ws show nope", status: 66, says: []string{"coppice ws ls"}},
		{line: "coppice ckpt show nope", status: 66, says: []string{"coppice ckpt ls"}},
		{line: "coppice restore nope", status: 66, says: []string{"coppice ckpt ls"}},
		{line: "coppice --server ${SERVER#http://} --token $KEY ws ls", says: []string{"demo"}},
		{line: "coppice --server foo ws ls", status: 2, says: []string{"https://HOST[:PORT]"}},
		{line: "coppice --server 'http://[::1' ws ls", status: 2, says: []string{"https://HOST[:PORT]"}},
		{line: "coppice --server http://no-such-host.invalid ws ls", status: 69, says: []string{"no server answers"}},
		{line: "coppice --token cpk_wrong ws ls", status: 77, says: []string{"key"}},
		{line: "coppice ws exec demo -- curl -sS -m 20 https://example.org/", status: 56, says: []string{"403"}},
		{line: "coppice ws egress demo", says: []string{"example.org", "denied"}},
		{line: "r=$(coppice --json fleet ls | jq -r '.[0].id'); coppice fleet drain $r; coppice ws create --name two; s=$?; coppice fleet undrain $r; exit $s", status: 69, says: []string{"drain"}, not: []string{"no runner is registered"}},
	}},
	{name: "12-output", setup: []string{demo, "coppice ckpt create demo --name before", "coppice fork before --name lost"}, tries: []try{
		{line: "coppice ws logs --console lost"},
		{line: "coppice ws exec lost -- sh -c 'for i in $(seq 100 200); do echo line-$i > /dev/kmsg; done; echo 8 > /proc/sys/kernel/printk; echo last-word > /dev/kmsg; echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger'", status: 66, says: []string{"lost"}},
		{line: "for i in $(seq 100); do coppice ws show lost | grep -q 'state  *lost' && exit; sleep 0.3; done; exit 1"},
		{line: "coppice ws show lost", says: []string{"panic of the guest's kernel: sysrq triggered crash", "what its machine said last", "\n  "}},
		{line: "coppice ws logs --console lost", says: []string{"Kernel panic", "last-word", "sysrq_handle_crash"}},
		{line: "coppice fork before -n 3", says: []string{"STAGES"}},
		{line: "coppice events", says: []string{"workspace.lost"}},
		{line: "coppice project ls", says: []string{"NAME", "default"}},
		{line: "coppice ws ls", says: []string{"NAME"}},
		{line: "coppice ckpt ls", says: []string{"before"}},
		{line: "coppice op ls --all", says: []string{"OPERATION"}},
		{line: "coppice fleet ls", says: []string{"ready"}},
		{line: "coppice image ls", says: []string{"base"}},
		{line: "coppice session ls demo"},
		{line: "coppice audit --last 1h", says: []string{"TIME"}},
		{line: "coppice key ls", says: []string{"NAME"}},
		{line: "coppice restore before --in lost", says: []string{"is ready"}},
		{line: "coppice ws exec lost -- true"},
	}},
	{name: "14-partial-failure", setup: []string{demo, "coppice ckpt create demo --name before"}, tries: []try{
		{line: "coppice ckpt rm before nope", status: 66, says: []string{"nope", "nothing was changed"}},
		{line: "coppice ckpt show before", says: []string{"captured"}},
		{line: "coppice ws rm demo nope", status: 66, says: []string{"nope", "nothing was changed"}},
		{line: "coppice ws show demo", says: []string{"ready"}},
	}},
	{name: "15-shell-diff-copy", setup: []string{demo, "coppice ckpt create demo --name before"}, tries: []try{
		{line: "coppice ws shell demo", keys: []press{{"#", "echo $0 $SHELL-$((1+1)); exit 4\n"}}, status: 4, says: []string{"bash", "/bin/bash-2"}},
		{line: "echo x | coppice ws cp - demo:/root/x"},
		{line: "coppice ws cp demo:/root/x - | cat", says: []string{"x"}},
		{line: "coppice fork before --name second && coppice ws cp demo:/root/x second:/root/y && coppice ws exec second -- cat /root/y", says: []string{"x"}},
		{line: "coppice ws exec demo -- sh -c 'echo 192.0.2.1 db >> /etc/hosts'"},
		{line: "coppice ckpt create demo --name after && coppice ckpt diff before after", says: []string{"A /root/x", "M /etc/hosts (content, in memory)"}},
		{line: "coppice fork after --name third && coppice ckpt create third --name third && coppice ckpt diff after third", not: []string{"in memory"}},
	}},
	{name: "16-missing", setup: []string{demo, "coppice ckpt create demo --name before"}, tries: []try{
		{line: "coppice __complete ws show ''", says: []string{"demo"}},
		{line: "coppice __complete fork ''", says: []string{"demo", "before"}},
		{line: "coppice __complete ws create --image ''", says: []string{"base"}},
		{line: "coppice __complete project show ''", says: []string{"default"}},
		{line: "for s in bash zsh fish; do coppice completion $s | wc -c; done"},
		{line: "coppice ws rename demo other && coppice ws label other a=b && coppice ws ls --label a=b", says: []string{"other"}},
		{line: "coppice ckpt rename before then && coppice ckpt label then keep=yes", says: []string{"keep=yes"}},
		{line: "coppice ckpt cat then:/etc/debian_version"},
		{line: "coppice ckpt ls then:/etc", says: []string{"passwd"}},
		{line: "coppice ws network other --add pypi.org && coppice ws network other --add example.com --remove pypi.org", says: []string{"example.com"}},
		{line: "coppice ws exec other -- sh -c 'command -v curl && command -v git && command -v python3'"}, // the image of tests has no more
		{line: "coppice session ls other"},
		{line: "coppice image build --help", says: []string{"--guest-ca-file"}},
		{line: "coppice ckpt export then -o then.ckpt && test $(stat -c %s then.ckpt) -gt 10000000 && rm then.ckpt", says: []string{" MiB in "}},
		{line: "coppice ckpt import /dev/null", status: 78, says: []string{"--store"}},
	}},
}
