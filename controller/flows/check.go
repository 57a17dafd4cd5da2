package flows

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/core"
)

// plainFlows leaves out records that are no valid flows, and changes the texts of the others so that they can be stored: guests chose them.
func plainFlows(list []core.Flow) (plain []core.Flow, odd int) {
	for _, f := range list {
		if !isFlow(f) {
			odd++
			continue
		}
		f.At, f.Ended = f.At.UTC().Truncate(time.Microsecond), f.Ended.UTC().Truncate(time.Microsecond) // the precision of the database
		f.Host, f.Method, f.Path = plainText(f.Host, 255), plainText(f.Method, 40), plainText(f.Path, 2048)
		f.Rule, f.Grant, f.Reason = plainText(f.Rule, 300), plainText(f.Grant, 64), plainText(f.Reason, 500)
		f = plainCount(f)
		f.Sent, f.Received, f.Status = min(max(f.Sent, 0), maxCount), min(max(f.Received, 0), maxCount), min(max(f.Status, 0), 999)
		plain = append(plain, f)
	}
	return plain, odd
}

// maxCount is the largest number in one record, so that sums of many records do not overflow.
const maxCount = 1 << 50

// plainCount removes the count of a flow that was not denied. It bounds other counts and their times.
func plainCount(f core.Flow) core.Flow {
	if f.Outcome != core.FlowDenied || f.Count <= 0 {
		f.Count, f.Last = 0, time.Time{}
		return f
	}
	f.Count = min(f.Count, maxCount)
	if f.Last = f.Last.UTC().Truncate(time.Microsecond); f.Last.Before(f.At) || !f.Last.Before(lastAt) {
		f.Last = f.At
	}
	return f
}

// The bounds of the time of a flow.
var (
	firstAt = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	lastAt  = time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)
)

func isFlow(f core.Flow) bool {
	switch f.Spoken {
	case core.SpokenHTTP, core.SpokenTLS, core.SpokenTCP:
	default:
		return false
	}
	switch f.Outcome {
	case core.FlowAllowed, core.FlowDenied, core.FlowCut, core.FlowFailed:
	default:
		return false
	}
	in := func(t time.Time) bool { return !t.Before(firstAt) && t.Before(lastAt) }
	if !in(f.At) || !f.Ended.IsZero() && !in(f.Ended) {
		return false
	}
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
	return f.ID != "" && len(f.ID) <= 64 && strings.Trim(f.ID, letters) == ""
}

// plainText makes a text that every component can store, of at most limit bytes.
func plainText(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
