package core_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestDataKeyIsHidden prints keys, alone and in other values, in every way that a program might print them by accident.
func TestDataKeyIsHidden(t *testing.T) {
	t.Parallel()
	k := core.NewDataKey()
	type holder struct {
		Name string
		Keys map[string]core.DataKey
		One  *core.DataKey
	}
	h := holder{"h", map[string]core.DataKey{"p/": k}, &k}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		fmt.Fprintf(&out, verb+verb+verb, k, &k, h.Keys)
	}
	fmt.Fprintln(&out, k, fmt.Errorf("with %v", k))
	for _, handler := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(handler).Info("keys", "key", k)
	}
	numbers := strings.Trim(fmt.Sprintf("%d", k[:8]), "[]")
	for _, form := range []string{string(k[:8]), hex.EncodeToString(k[:8]), strings.ToUpper(hex.EncodeToString(k[:8])), base64.StdEncoding.EncodeToString(k[:6]), numbers} {
		if strings.Contains(out.String(), form) {
			t.Errorf("%q is printed: %s", form, out.String())
		}
	}
}

func TestDataKeyWire(t *testing.T) {
	t.Parallel()
	k := core.NewDataKey()
	b, err := json.Marshal(map[string]core.DataKey{"p/": k})
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]core.DataKey
	if err := json.Unmarshal(b, &got); err != nil || got["p/"] != k {
		t.Fatalf("%s: %v", b, err)
	}
	for _, bad := range []string{"", "AAAA", base64.StdEncoding.EncodeToString(k[:31]), base64.StdEncoding.EncodeToString(k[:]) + "=", strings.Repeat("!", 44)} {
		var k core.DataKey
		err := k.UnmarshalText([]byte(bad))
		if e, ok := errors.AsType[*core.Error](err); !ok || e.Code != core.CodeInvalidField || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
