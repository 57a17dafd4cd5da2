package core

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// The bounds of the record of a flow, in bytes of its JSON encoding, whatever a guest or a host has sent. Each text is
// clipped by the length of its encoding, so that the sum of the bounds limits the whole record.
const (
	MaxFlowEncoded = 2 << 10
	MaxFlowID      = 64
	maxFlowHost    = 255
	maxFlowMethod  = 40
	maxFlowPath    = 160
	maxFlowRule    = 300
	maxFlowGrant   = 64
	MaxFlowReason  = 400
)

// Clipped returns the flow in the form of a record: its texts are valid UTF-8 without control characters, and its
// encoding has at most MaxFlowEncoded bytes. Every record is made by it, so no other code has to check the texts.
func (f Flow) Clipped() Flow {
	f.ID, f.SandboxID = ClipText(f.ID, MaxFlowID), SandboxID(ClipText(string(f.SandboxID), MaxFlowID))
	f.Spoken, f.Outcome = Spoken(ClipText(string(f.Spoken), maxFlowMethod)), Outcome(ClipText(string(f.Outcome), maxFlowMethod))
	f.Host, f.Method, f.Path = ClipText(f.Host, maxFlowHost), ClipText(f.Method, maxFlowMethod), ClipText(f.Path, maxFlowPath)
	f.Rule, f.Grant, f.Reason = ClipText(f.Rule, maxFlowRule), ClipText(f.Grant, maxFlowGrant), ClipText(f.Reason, MaxFlowReason)
	return f
}

// clippedEnd replaces the part that was cut off.
const clippedEnd = "..."

// ClipText cleans foreign text: the result is valid UTF-8 without control characters, takes at most limit bytes in JSON, and ends with an
// ellipsis if it was cut.
func ClipText(s string, limit int) string {
	if len(s) <= limit && plain(s) {
		return s
	}
	var b strings.Builder
	room, fits := limit, 0 // fits is the length of b after which an ellipsis still has room
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		i += n
		if r == utf8.RuneError && n <= 1 || unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp) {
			r = '?'
		}
		if room -= encodedSize(r); room < 0 {
			return b.String()[:fits] + clippedEnd[:min(limit, len(clippedEnd))]
		}
		b.WriteRune(r)
		if room >= len(clippedEnd) {
			fits = b.Len()
		}
	}
	return b.String()
}

// plain reports whether a text has only characters that the encoding leaves unchanged.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= 0x7f || encodedSize(rune(c)) != 1 {
			return false
		}
	}
	return true
}

// encodedSize is the number of bytes that encoding/json uses for a character that is not a control character.
func encodedSize(r rune) int {
	switch r {
	case '"', '\\':
		return len(`\"`)
	case '<', '>', '&': // escaped, for use in HTML
		return len(`\u0026`)
	}
	return utf8.RuneLen(r)
}
