package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"net"
	"syscall"

	"github.com/coppice-dev/coppice/core"
)

// fault is the reason of a failed flow, in fixed words. The error of a library may quote the host's answer, with a
// secret in it, so no part of such an error reaches the guest or the journal.
type fault struct{ class, sentence string }

func (f *fault) Error() string { return f.class + ": " + f.sentence }

func newFault(class, sentence string) *fault { return &fault{class, sentence} }

// The faults between the proxy and a host.
var (
	errNoName      = newFault("no_such_name", "the host's name was not found")
	errNoAddress   = newFault("no_such_name", "the host's name has no address")
	errNameServer  = newFault("name_server", "the name server of this runner did not give the host's address")
	errTimeout     = newFault("timeout", "the host did not answer in time")
	errRefused     = newFault("refused", "the host refused the connection")
	errUnreachable = newFault("unreachable", "the host's network could not be reached")
	errReset       = newFault("closed", "the connection was closed before the exchange was over")
	errTLS         = newFault("tls", "the TLS connection to the host could not be made")
	errCertificate = newFault("tls", "the host's certificate is not valid for its name")
	errMalformed   = newFault("malformed_answer", "the host's answer could not be read")
	errSilent      = newFault("no_answer", "the host did not answer")
	errUpgrade     = newFault("malformed_answer", "the host switched to another protocol on a connection that cannot be handed over")
	errNotTrusted  = newFault("tls", "the guest's program did not accept the certificate of the project's authority")
	errGivenUp     = newFault("cancelled", "the guest cancelled the request")
	errForbidden   = newFault("forbidden", "a sandbox may never reach the host's address")
	errLocal       = newFault("local", "this runner's host has no sockets, ports or memory left for it")
)

// outcomeOf returns the outcome of a failed flow and its reason.
func outcomeOf(err error) (core.Outcome, string) {
	if d, ok := isDenial(err); ok {
		return core.FlowDenied, d.Error()
	}
	if d, ok := errors.AsType[*dialError](err); ok && d.denied {
		return core.FlowDenied, d.Error() // written by egress/policy, about an address
	}
	return core.FlowFailed, faultOf(err).Error()
}

// faultOf returns the fault for an error, and never quotes the error. An unknown error counts as an unreadable answer,
// because all other errors of a transport have a type.
func faultOf(err error) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		if dns.IsNotFound {
			return errNoName
		}
		return errNameServer
	}
	if core.CategoryOf(err) == core.PermissionDenied { // the address was checked again and is now a denied one
		return errForbidden
	}
	if f := tlsFaultOf(err); f != nil {
		return f
	}
	for _, c := range []struct {
		is error
		f  *fault
	}{
		{context.Canceled, errGivenUp},
		{context.DeadlineExceeded, errTimeout},
		{syscall.ECONNREFUSED, errRefused},
		{syscall.EHOSTUNREACH, errUnreachable},
		{syscall.ENETUNREACH, errUnreachable},
		{syscall.EADDRNOTAVAIL, errUnreachable},
		{syscall.ECONNRESET, errReset},
		{syscall.EPIPE, errReset},
		{io.EOF, errReset},
		{io.ErrUnexpectedEOF, errReset},
		{net.ErrClosed, errReset},
		{fs.ErrClosed, errReset},
		{syscall.EMFILE, errLocal},
		{syscall.ENFILE, errLocal},
		{syscall.ENOBUFS, errLocal},
		{syscall.ENOMEM, errLocal},
	} {
		if errors.Is(err, c.is) {
			return c.f
		}
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return errTimeout
	}
	return errMalformed
}

// tlsFaultOf returns the fault of a handshake; nil if the error is not from a handshake.
func tlsFaultOf(err error) *fault {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return errCertificate
	}
	_, hostname := errors.AsType[x509.HostnameError](err)
	_, invalid := errors.AsType[x509.CertificateInvalidError](err)
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	if hostname || invalid || unknown {
		return errCertificate
	}
	_, alert := errors.AsType[tls.AlertError](err)
	_, record := errors.AsType[tls.RecordHeaderError](err)
	if op, ok := errors.AsType[*net.OpError](err); alert || record || ok && (op.Op == "remote error" || op.Op == "local error") {
		return errTLS
	}
	return nil
}
