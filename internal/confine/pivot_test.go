package confine_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/confine"
)

// TestPivotIsTriedAgain: a temporary error is not remembered as the host's answer. A real answer is.
func TestPivotIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{true, false} {
		tries := 0
		can := confine.Remember(func() (bool, error) {
			if tries++; tries == 1 {
				return false, unix.ENOSPC
			}
			return allowed, nil
		})
		if _, err := can(); err == nil {
			t.Error("the first error is not returned")
		}
		for range 2 {
			if got, err := can(); got != allowed || err != nil {
				t.Errorf("after an error that has passed: %v, %v; want %v", got, err, allowed)
			}
		}
		if tries != 2 {
			t.Errorf("it was tried %d times", tries)
		}
	}
}
