package firsthour

import "strings"

const needsStore = "it needs a store, which `coppice dev` has with --store only: internal/test/e2e.TestExportToAnotherCluster exports and imports"

// cliSetup makes what the examples of docs/CLI.md name. The file id has the checkpoint that they call 9r4w6xcv.
var cliSetup = []string{
	demo, "coppice ws create --name second", "coppice ckpt create demo --name before-upgrade",
	"coppice ws exec demo -- sh -c 'mkdir -p /workspace && echo out > /workspace/out.txt' && coppice ws exec second -- mkdir -p /workspace",
	"coppice ckpt create demo -q > id", "mkdir -p src && echo x > src/x && echo secret-of-nobody > key && printf %s $KEY > agent.key",
	"coppice ws attest demo > demo.attestation && coppice authority > authority.pem", "coppice project create blue",
}

// cliRules are the rules for the examples of docs/CLI.md.
func cliRules() map[string]rule {
	// follow runs a command that never ends, and presses Ctrl-C once it has printed something.
	follow := func(line, until string) rule {
		return rule{instead: line + " > followed & p=$!; until [ -s followed ]; do " + until + "; done; kill -INT $p; wait $p", status: 130}
	}
	rules := map[string]rule{
		"coppice attest verify demo.attestation --authority authority.pem --workspace ws_06e5bqv7z0f3m8k2h1t9r4w6xc": {
			instead: "coppice attest verify demo.attestation --authority authority.pem --workspace $(coppice --json ws show demo | jq -r .id)",
		},
		"coppice ckpt create demo --name before-upgrade":                                                                                   {before: "coppice ckpt rename before-upgrade ''"},
		"coppice ckpt export before-upgrade -o - | ssh other coppice ckpt import -":                                                        {skip: needsStore},
		"coppice ckpt import before.ckpt --name before-upgrade":                                                                            {skip: needsStore},
		"coppice image build . --name app":                                                                                                 {skip: byImages},
		"coppice image build . -f deploy/Dockerfile --name app --build-arg VERSION=3 --start \"./serve\" --ready-port 8080":                {skip: byImages},
		"coppice ws exec demo --checkpoint on_success -- make test":                                                                        {instead: "coppice ws exec demo --checkpoint on_success -- true"},
		"coppice ckpt rename 9r4w6xcv before-upgrade":                                                                                      {before: "coppice ckpt rename before-upgrade ''"},
		"coppice context add lab https://ctl-1:7070 --token-file agent.key --use":                                                          {instead: "COPPICE_CONNECTION=$PWD/other.json coppice context add lab https://ctl-1:7070 --token-file agent.key --use"},
		"coppice events --follow --type workspace.ready --type operation":                                                                  follow("coppice events --follow --type workspace.ready --type operation", "coppice ws create -q"),
		"coppice events --follow --after 4711 --json":                                                                                      follow("coppice events --follow --after 0 --json", "sleep 0.1"),
		"coppice grant put demo openai --secret-file - < key":                                                                              {before: "coppice ws network demo --add api.openai.com --add tickets.example.com"},
		"coppice grant put demo openai --vault-ref vault://secret/agents/openai#key --rpm 60":                                              {skip: byVault},
		"coppice key create agent --project blue --scope workspace:read,workspace:create,workspace:exec,checkpoint:read,checkpoint:create": {before: "coppice key revoke agent --project blue"},
		"COPPICE_TOKEN_FILE=agent.key coppice mcp":                                                                                         {instead: "COPPICE_TOKEN_FILE=agent.key coppice mcp < /dev/null"},
		"coppice mcp --listen 127.0.0.1:7080":                                                                                              {keys: []press{{"127.0.0.1:7080", ctrlC}}},
		"coppice op cancel op_06h23pjzw358e1dsh3eef37yt8":                                                                                  {instead: "coppice op cancel $(coppice op ls --all -q | head -1)"},
		"coppice project create blue --quota workspaces=100 --quota checkpoint_bytes=1000000000000":                                        {before: "coppice project rm blue"},
		"coppice restore before-upgrade --name second-try":                                                                                 {before: "coppice ckpt rename $(cat id) before-upgrade"},
		"coppice step 9r4w6xcv actions.json":                                                                                               {before: `echo '{"actions": [{"command": ["true"]}, {"command": ["id", "-un"], "keep": "nothing"}]}' > actions.json`},
		"coppice session kill demo 9r4w6xcv": {
			before: "coppice ws exec -d demo -- sleep 1000 > session", instead: "coppice session kill demo $(cat session)",
		},
		"coppice session kill demo 9r4w6xcv --signal KILL --target group": {
			before: "coppice ws exec -d demo -- sleep 1000 > session", instead: "coppice session kill demo $(cat session) --signal KILL --target group",
		},
		"coppice ws cp demo:/workspace/out.txt .":                                                {before: "coppice ws exec demo -- sh -c 'echo out > /workspace/out.txt'"},
		"coppice ws create --name demo":                                                          {instead: "coppice ws create --name third"},
		"coppice ws create --image demo --vcpus 2 --memory 1024 --env DEBUG=1":                   {instead: "coppice ws create --image base --vcpus 1 --memory 512 --env DEBUG=1"},
		"tar c . | coppice ws exec -i demo -- tar x -C /workspace":                               {instead: "tar c src | coppice ws exec -i demo -- tar x -C /workspace"},
		"tar c . | coppice ws cp --tar - demo:/workspace":                                        {instead: "tar c src | coppice ws cp --tar - demo:/workspace"},
		"coppice ws forward demo 8080:80":                                                        {keys: []press{{"-> demo:80", ctrlC}}},
		"coppice ws forward demo --stop 127.0.0.1:8080":                                          {before: "coppice ws forward demo 8080:80 --detach"},
		"coppice ws logs -f demo":                                                                {before: "coppice ws exec demo -- true"},
		"coppice ws rename demo release":                                                         {instead: "coppice ws rename third release"},
		"coppice ws watch -r demo:/workspace":                                                    follow("coppice ws watch -r demo:/workspace", "coppice ws exec demo -- touch /workspace/new"),
		"coppice image build --name demo --package python3-toolz":                                {skip: byImages},
		"docker export $(docker create alpine) | coppice image build --name alpine --from-tar -": {skip: byImages},
		"coppice runner-trash --data-dir /var/lib/coppice":                                       {skip: "it removes files of a runner: internal/daemon has a test for each of its refusals"},
		"coppice store check --read-data-subset=10%":                                             {skip: needsStore},
		"coppice store check --read-data-subset=$(( $(date +%j) % 30 + 1 ))/30":                  {skip: needsStore},
	}
	for _, line := range []string{
		"coppice image pull python:3.12-slim", "coppice image pull --name app --mirror mirror.example:5000 registry.example/team/app:1.4",
		"coppice image pull --plain-http localhost:5000 localhost:5000/app",
	} {
		rules[line] = rule{skip: "it needs a registry: internal/test/e2e.TestPulledImage has one"}
	}
	for _, line := range []string{
		"coppice controller --database postgres://coppice@db/coppice --key-file /etc/coppice/cluster.key --api-key-file /etc/coppice/api.key --listen 0.0.0.0:7070 --tls-cert api.pem --tls-key api.key --runner-listen 0.0.0.0:7071",
		"coppice migrate --database-file /etc/coppice/database", "coppice migrate --check --database postgres://coppice@db/coppice",
		"coppice runner-token create > /etc/coppice/join-token", "coppice runner-token create > join-token",
		"coppice runner --controller https://ctl-1:7071 --controller https://ctl-2:7071 --join-token-file /etc/coppice/join-token --listen 0.0.0.0:7072",
		"coppice runner-token ensure --data-dir /var/lib/coppice --out /run/coppice-join/token",
	} {
		rules[line] = rule{skip: byPool}
	}
	return rules
}

// named replaces the name that documents give to a checkpoint by that of the session.
func named(line string) string { return strings.ReplaceAll(line, "9r4w6xcv", "$(cat id)") }
