package core

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"
)

// FuzzClipped: whatever texts a flow has, its record is within its bound and contains only valid text.
func FuzzClipped(f *testing.F) {
	for _, s := range []string{"", "a.example", "&", "\"", "\\", "<>", "\u2028", "\x00\x1b[2J", "\xff\xfe", "é", "\U0001f600", "\ufffd"} {
		for _, n := range []int{1, 80, 60_000} {
			f.Add([]byte(strings.Repeat(s, n)))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := string(b)
		late := time.Date(9999, 12, 31, 23, 59, 59, 999999999, time.UTC)
		flow := Flow{
			ID: s, SandboxID: SandboxID(s), Epoch: math.MinInt64, At: late, Spoken: Spoken(s), Host: s, Port: math.MaxUint16, Method: s, Path: s, Outcome: Outcome(s), Rule: s, Grant: s,
			Reason: s, Ended: late, Status: math.MinInt64, Sent: math.MinInt64, Count: math.MinInt64, Last: late, Received: math.MinInt64,
		}
		clipped := flow.Clipped()
		encoded, err := json.Marshal(clipped)
		if err != nil || len(encoded) > MaxFlowEncoded {
			t.Fatalf("%d bytes, %v", len(encoded), err)
		}
		if clipped.Clipped() != clipped {
			t.Fatalf("%q is clipped again", clipped.Reason)
		}
		for _, text := range []string{clipped.ID, clipped.Host, clipped.Reason} {
			if !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
				t.Fatalf("%q is no text", text)
			}
		}
		if plain(s) && len(s) <= MaxFlowID && clipped.ID != s {
			t.Fatalf("%q became %q", s, clipped.ID)
		}
	})
}

// TestClipText cuts between characters, and marks the cut.
func TestClipText(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"": "", "abcdefgh": "abcdefgh", "abcdefghi": "abcde...", "éééé": "éééé", "ééééé": "éé...", "&&": "...", "a\x1bb": "a?b", "\xff": "?"} {
		if got := ClipText(in, 8); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
}
