package grant

import (
	"unicode/utf8"

	"github.com/coppice-dev/coppice/core"
)

// CheckSecret refuses a secret that cannot stand in a header, or is so short that answers contain it by accident. The
// error does not quote it.
func CheckSecret(text string) error {
	bad := func(why string) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "secret: %s", why)
	}
	switch {
	case len(text) < MinSecret || len(text) > MaxSecret:
		return bad("it must have between 8 bytes and 16 KiB")
	case !utf8.ValidString(text):
		return bad("it must be text in UTF-8")
	case text[0] == ' ' || text[len(text)-1] == ' ':
		return bad("it begins or ends with a space, which no header keeps")
	}
	for _, c := range text {
		if c < ' ' || c == 0x7f {
			return bad("it contains a line break or another control character; give it exactly as it must stand in a header")
		}
	}
	return nil
}
