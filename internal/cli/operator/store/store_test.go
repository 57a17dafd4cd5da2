package store

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

func TestStoreCommands(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewCommand)
	for _, c := range []struct {
		line   string
		unwell bool
		status int
		out    string
		sent   int
	}{
		{"store gc --dry-run", false, 0, "3 objects (4.0 MiB) of deleted checkpoints to remove, 2 more wait for the end of their grace period, 1 are newly unreferenced\n" +
			"6 objects (7.0 MiB) of abandoned uploads to remove, 5 more uploads wait\n", 1},
		{"store gc", false, 0, "6 objects (8.0 MiB) of deleted checkpoints removed, 2 more wait for the end of their grace period, 2 are newly unreferenced\n" +
			"12 objects (14.0 MiB) of abandoned uploads removed, 5 more uploads wait\n", 2}, // the first request did not get done
		{"store check", false, 0, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n", 0},
		{"store check", true, 1, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"missing     v1/a (1.0 KiB)\nforeign     v1/b\\x1b (2.0 KiB)\nand more\n", 0},
		{"store check --read-data-subset=3/10", false, 0, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"20 frames (2.0 MiB) of 4 checkpoints, part 3/10, were read and are correct\n", 2},
		{"store check --read-data-subset=100%", true, 1, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"missing     v1/a (1.0 KiB)\nforeign     v1/b\\x1b (2.0 KiB)\nand more\n20 frames (2.0 MiB) of 4 checkpoints, part 1/1, were read and are correct\n" +
			"CHECKPOINT_CORRUPT  v1/p/c/1/pack-0: not what was stored\\x1b\n  needed by ckpt_a, ckpt_b and 3 more\n", 2},
		{"store check --read-data-subset=11/10", false, 2, "", 0},
	} {
		f.Requests, f.FailChild = nil, c.unwell
		status, stdout, stderr := run(strings.Fields(c.line)...)
		if status != c.status || stdout != c.out || len(f.Requests) != c.sent {
			t.Errorf("%s: status %d, %d requests\n%s%s", c.line, status, len(f.Requests), stdout, stderr)
		}
	}
}

func TestParseSubset(t *testing.T) {
	t.Parallel()
	for text, of := range map[string]int{"1/1": 1, "7/10": 10, "100%": 1, "10%": 10, "33%": 3, "0.5%": 200, "0.0001%": 1_000_000} {
		if got, err := parseSubset(text); err != nil || got.Of != of || got.Which < 1 || got.Which > of {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"0/1", "2/1", "1", "1/", "/1", "x/2", "-1/2", "1/10000000", "0%", "101%", "-1%", "NaN%", "%", "0.00001%"} {
		if got, err := parseSubset(text); err == nil {
			t.Errorf("%s: %+v", text, got)
		}
	}
}
