package terminal

import (
	"errors"
	"testing"
)

func TestKeyboard(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		typed []string
		plain bool
		sent  string
		left  bool
	}{
		{typed: []string{"ls\r", "exit\r"}, sent: "ls\rexit\r"},
		{typed: []string{"~", "."}, left: true},
		{typed: []string{"~."}, left: true},
		{typed: []string{"ls\r~."}, sent: "ls\r", left: true},
		{typed: []string{"\x03~."}, sent: "\x03", left: true},
		{typed: []string{"~", "~", ".\r"}, sent: "~.\r"},
		{typed: []string{"~", "/x\r"}, sent: "~/x\r"},
		{typed: []string{"cd ~", ".\r"}, sent: "cd ~.\r"},
		{typed: []string{"~\r", "~."}, sent: "~\r", left: true},
		{typed: []string{"~", "."}, plain: true, sent: "~."},
	} {
		k := &keyboard{lineStart: true, plain: c.plain}
		var err error
		for _, keys := range c.typed {
			if err = k.typed([]byte(keys)); err != nil {
				break
			}
		}
		if string(k.pending) != c.sent || errors.Is(err, errLeft) != c.left {
			t.Errorf("%q: sent %q, %v", c.typed, k.pending, err)
		}
	}
}
