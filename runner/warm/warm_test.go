package warm

import (
	"context"
	"log/slog"
	"slices"
	"testing"
)

// TestDeadShellsGoFirst: what is left of a dead shell makes room before a shell that somebody can use, and does not outlive a purge.
func TestDeadShellsGoFirst(t *testing.T) {
	t.Parallel()
	made, dead := 0, map[int]bool{}
	var gone []int
	p := New(Config[string, int]{
		Keep: 2, Make: func(context.Context, string) (int, error) { made++; return made, nil },
		TakeDown: func(_ context.Context, s int) error { gone = append(gone, s); return nil },
		Dead:     func(s int) bool { return dead[s] }, Busy: func() bool { return false }, Log: slog.New(slog.DiscardHandler),
	})
	for range 2 {
		if !p.add(t.Context(), "a") {
			t.Fatal("no shell was made")
		}
	}
	dead[2] = true
	if s, ok := p.Take("a"); !ok || s != 1 {
		t.Fatalf("took %d, %t", s, ok)
	}
	if !p.add(t.Context(), "a") || !p.MakeRoom(t.Context()) || !slices.Equal(gone, []int{2}) {
		t.Errorf("taken down: %v", gone)
	}
	dead[3] = true
	if s, ok := p.Take("a"); ok {
		t.Errorf("took %d, which is dead", s)
	}
	if p.Purge(t.Context(), func(int) bool { return false }); !slices.Equal(gone, []int{2, 3}) {
		t.Errorf("taken down: %v", gone)
	}
	if p.MakeRoom(t.Context()) {
		t.Error("there was nothing to take down")
	}
}
