package foreign

import (
	"bytes"
	"strings"
	"testing"
)

// hostile clears a screen, sets a title, turns a line around and breaks it, in text and in bytes that are no text.
const hostile = "e\x1b[2J\x1b]0;t\x07\u009b31m\u202edcba\u2066\u200b\rx\x00\x7f\u2028z"

func TestVisible(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain text, ünïcode 世界 …": "plain text, ünïcode 世界 …", hostile: `e\x1b[2J\x1b]0;t\a\u009b31m\u202edcba\u2066\u200b\rx\x00\x7f\u2028z`,
		"a\nb\tc": `a\nb\tc`, "\xff\xfe": `\xff\xfe`, `it's "quoted" \x1b`: `it's "quoted" \x1b`, "\U000e0041": `\U000e0041`,
	} {
		if got := Visible(in); got != want {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
	text := strings.Repeat("line "+hostile+"\r\nünï\t世界\n", 3) + "\xe4\xb8"
	want := strings.Repeat("line "+Visible(hostile)+"\nünï\t世界\n", 3) + `\xe4\xb8`
	for _, step := range []int{1, 2, 3, 7, 1000} {
		var out bytes.Buffer
		w := NewWriter(&out)
		for rest := []byte(text); len(rest) > 0; {
			n := min(step, len(rest))
			if k, err := w.Write(rest[:n]); err != nil || k != n {
				t.Fatal(k, err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil || out.String() != want {
			t.Errorf("in steps of %d: %q, %v", step, out.String(), err)
		}
	}
}
