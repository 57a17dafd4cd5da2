package contexts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// TestContexts adds, chooses, lists and forgets servers.
func TestContexts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config", "connection.json")
	run := func(stdin string, args ...string) (int, string) {
		a, stdout, stderr := clitest.App(map[string]string{"COPPICE_CONNECTION": path})
		a.Stdin = strings.NewReader(stdin)
		status := a.Run(t.Context(), append([]string{"context"}, args...), NewCommand)
		return status, stdout.String() + stderr.String()
	}
	for _, c := range []struct {
		stdin  string
		args   []string
		status int
		says   string
	}{
		{"", []string{"ls"}, exit.OK, "No contexts."},
		{"key-1\n", []string{"add", "lab", "https://user:key-x@ctl-1:7070?t=key-y", "--token-file", "-"}, exit.OK, "lab is https://ctl-1:7070"},
		{"key-2\n", []string{"add", "home", "127.0.0.1:7071", "--token-file", "-"}, exit.OK, "home is http://127.0.0.1:7071"},
		{"", []string{"add", "other", "ctl-2:7070", "--token-file", "-"}, exit.Usage, "https://ctl-2:7070"},
		{"", []string{"add", "other", "https://ctl-2:7070", "--token-file", "-"}, exit.BadInput, "has no key in it"},
		{"", []string{"add", "other", "https://ctl-2:7070"}, exit.Usage, "--token-file"},
		{"", []string{"ls"}, exit.OK, "*        lab "},
		{"", []string{"use", "absent"}, exit.BadInput, "coppice context ls"},
		{"", []string{"use", "home"}, exit.OK, "http://127.0.0.1:7071"},
		{"", []string{"ls"}, exit.OK, "*        home "},
		{"", []string{"rm", "lab", "absent"}, exit.BadInput, `no context "absent"`},
		{"", []string{"ls"}, exit.OK, "lab "},
		{"", []string{"rm", "lab", "home"}, exit.OK, "forgotten"},
	} {
		status, said := run(c.stdin, c.args...)
		if status != c.status || !strings.Contains(said, c.says) || strings.Contains(said, "key-") {
			t.Errorf("%v: exit status %d, %q; want %d and %q", c.args, status, said, c.status, c.says)
		}
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("a file without contexts is left: %v", err)
	}
}
