package firsthour

// rule says how a command of a document is run, where that is not: as it stands, to its end, with status 0.
type rule struct {
	skip    string   // why it is not run
	before  string   // a shell line that is run before
	instead string   // the line that is run instead: with the name or the id of this session's objects
	keys    []press  // what is typed while it runs
	status  int      // the wanted exit status
	says    []string // texts that it must print
	differs bool     // what the document shows of its output is not compared: it is shortened or of another session
}

// page is a document whose commands are run in their order, by one shell after the other in one directory.
type page struct {
	file  string
	setup []string // shell lines that are run before the first command
	rules map[string]rule
	all   string // why none of its commands is run
}

// Why commands are not run here.
const (
	byBare    = "make targets take minutes: `make test-bare` runs `make demo` and `make test` on a fresh Debian, and internal/test/docs.TestMakeTargets wants every target of a document to exist"
	bySystem  = "it changes the system: internal/test/e2e has tests of the units and of the package that do it in a root of its own"
	byPool    = "it needs several hosts: internal/test/e2e.TestPool and internal/daemon have them"
	byImages  = "it builds an image, for a minute or more: the tests of images/build do that"
	byOutside = "it needs a program or a service that the tests' machines do not have"
	byVault   = "it needs a Vault: the tests of controller/secrets have one"
)

const demo = "coppice ws create --name demo"

var ctrlC = "\x03"

// pages are all documents with commands.
var pages = []page{
	{file: "README.md", rules: map[string]rule{
		"make demo": {skip: byBare}, "make demo-pool": {skip: byBare}, "make test": {skip: byBare}, "make image dev": {skip: byBare},
		"bin/coppice ws create --name demo": {before: "coppice ws rm demo"},
		"bin/coppice ws shell demo":         {keys: []press{{"#", "echo in-$((2+3)); exit\n"}}, says: []string{"in-5"}},
	}},
	{file: "docs/FIRST_STEPS.md", rules: map[string]rule{
		"bin/coppice ws shell demo": {keys: []press{{"#", "exit\n"}}},
		// The authority's file in a guest is written again or not, so it may be listed, too.
		"coppice ckpt diff before improved":                                               {differs: true, says: []string{"M /root/plan (content, mtime)", "0 added, ", " of memory differ"}},
		"bin/coppice grant put demo example --host api.example.com --secret-file - < key": {before: "echo secret-of-nobody > key"},
		"bin/coppice ws preview demo 8000":                                                {says: []string{"http://8000-"}},
		"bin/coppice ckpt cat improved:/root/plan":                                        {says: []string{"better"}},
	}},
	{file: "docs/INSTALL.md", rules: map[string]rule{
		"make setup": {skip: byBare}, "make build": {skip: byBare}, "make image": {skip: byBare}, "make dev": {skip: byBare},
	}},
	{file: "docs/API.md", rules: map[string]rule{}},
	{file: "docs/ATTESTATION.md", setup: []string{demo}, rules: map[string]rule{
		"coppice attest verify demo.attestation --authority authority.pem --workspace ws_06e5bqv7z0f3m8k2h1t9r4w6xc --epoch 1": {
			instead: "coppice attest verify demo.attestation --authority authority.pem --workspace $(coppice ws ls -q | head -1) --epoch 1",
		},
	}},
	{file: "docs/PREVIEWS.md", setup: []string{demo}, rules: map[string]rule{
		"coppice ws preview demo 3000 --signed": {differs: true, says: []string{"http://3000-", "?coppice_token="}},
	}},
	{file: "docs/MCP.md", rules: map[string]rule{
		"claude mcp add coppice --env COPPICE_SERVER=http://127.0.0.1:7070 --env COPPICE_TOKEN=cpk_… -- coppice mcp": {skip: byOutside},
	}},
	{file: "docs/CLI.md", setup: cliSetup, rules: cliRules()},
	{file: "docs/BENCHMARKS.md", all: byBare},
	{file: "docs/SCALE.md", all: byBare},
	{file: "docs/DEVELOPING.md", all: "they run tests"},
	{file: "docs/IMAGES.md", all: byImages},
	{file: "docs/OPERATIONS.md", all: bySystem + "; the pool's commands need several hosts: internal/test/e2e.TestPool"},
	{file: "docs/ADAPTERS.md", all: "`make test-sdk` runs Harbor with these tasks"},
	{file: "docs/COMPATIBILITY.md", all: "`make test-compat` runs these clients with these settings"},
	{file: "docs/verification/cloud-hypervisor.md", all: byBare},
}
