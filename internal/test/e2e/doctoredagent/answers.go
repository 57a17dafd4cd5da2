//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// badAnswers gives bad answers to the requests of one stage. The stages are reseal, release, wait
// (of a session) and public. Public is everything that a user of the workspace can ask for. The
// kinds are:
//
//	long       JSON without end, as fast as it is taken
//	many       31 MiB of well-formed JSON, with millions of elements
//	malformed  something that is no JSON
type badAnswers struct{ armed atomic.Pointer[badAnswer] }

type badAnswer struct{ kind, stage string }

// arm takes KIND:STAGE.
func (b *badAnswers) arm(what string) {
	kind, stage, _ := strings.Cut(what, ":")
	b.armed.Store(&badAnswer{kind, stage})
}

// gives answers a request if it belongs to the stage, and reports whether it did.
func (b *badAnswers) gives(w http.ResponseWriter, r *http.Request) bool {
	a := b.armed.Load()
	if a == nil || a.stage != stageOf(r.URL.Path) && (a.stage != "public" || !isPublic(r.URL.Path)) {
		return false
	}
	w.Header().Set("Content-Type", "application/json")
	switch a.kind {
	case "long":
		_, err := io.WriteString(w, `{"id":"`)
		for block := bytes.Repeat([]byte("a"), 64<<10); err == nil; {
			_, err = w.Write(block)
		}
	case "many":
		_, err := fmt.Fprintf(w, `{%q:[{}`, listOf(r.URL.Path))
		for block, n := bytes.Repeat([]byte(",{}"), 16<<10), 0; err == nil && n < 31<<20; n += len(block) {
			_, err = w.Write(block)
		}
		_, _ = io.WriteString(w, "]}")
	default: // malformed
		_, _ = io.WriteString(w, "{\"id\": ]\x00\x1b[31m")
	}
	return true
}

// listOf names a list that the honest answer has, so that its reader would keep the elements.
func listOf(path string) string {
	switch path {
	case guestapi.PathReseal:
		return "steps"
	case guestapi.PathProcesses:
		return "processes"
	}
	return "sessions"
}

func stageOf(path string) string {
	switch {
	case path == guestapi.PathReseal:
		return "reseal"
	case path == guestapi.PathRelease:
		return "release"
	case strings.HasSuffix(path, "/wait"):
		return "wait"
	}
	return ""
}

func isPublic(path string) bool {
	for _, p := range []string{guestapi.PathSessions, guestapi.PathFiles, guestapi.PathProcesses} {
		if strings.HasPrefix(path, p) {
			return true
		}
	}
	return false
}
