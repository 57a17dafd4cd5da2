package testaddr_test

import (
	"net"
	"runtime"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testaddr"
)

// TestAddressIsKept listens, stops, has others ask for free ports, and comes back.
func TestAddressIsKept(t *testing.T) {
	t.Parallel()
	listen := func(address string) net.Listener {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := listen(testaddr.New())
	address := l.Addr().String()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if runtime.GOOS == "linux" {
		if other, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:"+port); err == nil { // whoever has it does not matter
			defer other.Close()
		}
	}
	_ = listen(address).Close()
}
