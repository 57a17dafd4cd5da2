package pgtx

import (
	"context"
	"strings"

	"github.com/coppice-dev/coppice/controller"
)

// originOf is what the audit triggers read until the transaction ends: five words, and some may be empty.
func originOf(ctx context.Context) string {
	o, request := controller.OriginOf(ctx)
	return plain(o.Actor) + " " + plain(o.Source) + " " + plain(o.Action) + " " + plain(request) + " " + plain(string(o.Operation))
}

// plain drops what would make other words of it, or none: ids, addresses and names have nothing of it.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("_.:-[]%", r):
			return r
		}
		return -1
	}, s)
}
