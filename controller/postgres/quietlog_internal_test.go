package postgres

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// TestQuiet: what the library says because everything stops is not logged, whether it gives the error or its text.
func TestQuiet(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := slog.New(quiet{slog.NewTextHandler(&out, nil)})
	log.Error("stops", "error", context.Canceled.Error())
	log.Error("stops", "err", fmt.Errorf("fetch: %w", context.Canceled))
	log.Info("as usual")
	if out.Len() > 0 {
		t.Errorf("%s", &out)
	}
	log.Error("trouble", "error", "no space left")
	log.Error("trouble", "err", errors.New("no space left"))
	if n := strings.Count(out.String(), "trouble"); n != 2 {
		t.Errorf("%d errors of 2 are logged: %s", n, &out)
	}
}
