package fleet

import (
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// cleanWrites takes the first writes that a runner reports of its data plane, up to the bound, and removes text that the database
// would refuse. The answer to the heartbeat says how many were taken.
func cleanWrites(list []runnerapi.DataWrite) []runnerapi.DataWrite {
	out := make([]runnerapi.DataWrite, 0, min(len(list), runnerapi.MaxDataWrites))
	for _, w := range list[:min(len(list), runnerapi.MaxDataWrites)] {
		w.RequestID, w.Source, w.Path = cleanText(w.RequestID, 64), cleanText(w.Source, 64), cleanText(w.Path, runnerapi.MaxDataPath)
		w.SandboxID, w.KeyID = core.SandboxID(cleanText(string(w.SandboxID), 64)), core.KeyID(cleanText(string(w.KeyID), 64))
		out = append(out, w)
	}
	return out
}

func cleanText(s string, most int) string {
	s = strings.ToValidUTF8(s[:min(len(s), most)], "?")
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
}
