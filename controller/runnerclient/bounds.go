package runnerclient

import (
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// The bounds of each answer of a runner. A runner may have been taken over, and is trusted for its own sandboxes only. No text is
// cut: an answer is taken whole or refused.
var (
	boundSmall  = whole("a runner's answer", 1<<20, 16<<10, 1<<10)
	boundImages = whole("a runner's list of images", 4<<20, 64<<10, 4<<10)
	boundFile   = whole("a runner's part of a file", 64<<20, 20*runnerapi.MaxFileEntries, runnerapi.MaxFileEntries)
	boundDiff   = whole("a runner's page of a diff", 64<<20, 20*runnerapi.MaxDiffFiles, runnerapi.MaxDiffFiles)
)

// Of a fork, for each child: a report of 64 steps with 48 pieces of evidence and 256 processes, and then as much again.
const (
	childBytes    = 2 << 20
	childElements = 16 << 10
	maxChildren   = 1 << 10
)

func boundFork(children int) boundjson.Bound {
	n := min(children, maxChildren) + 1
	return whole("a runner's answer to a fork", min(maxAnswer, int64(n)*childBytes), n*childElements, max(maxChildren, 1<<10))
}

func whole(name string, bytes int64, elements, list int) boundjson.Bound {
	return boundjson.Bound{Name: name, Bytes: bytes, Elements: elements, List: list, Depth: 16, String: int(bytes), Text: int(bytes)}
}
