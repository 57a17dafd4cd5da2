//go:build linux

package reseal

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // G505: for a file name, as OpenSSL does it
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// The places where images keep trusted CAs: one file with all of them, and for OpenSSL a directory with one file each,
// which OpenSSL finds by a hash.
var trustBundles = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}

const (
	trustDir  = "/etc/ssl/certs"
	trustName = "coppice-egress.pem"
)

// The marks around the project's CA in a bundle.
const (
	caBegin = "# coppice: begin\n"
	caEnd   = "# coppice: end\n"
)

// stepCA adds the CA to the trusted CAs of the image, unless it is there already. It runs no program of the image.
func stepCA(_ context.Context, r *Run) (Evidence, error) {
	if r.req.CA == "" {
		return nil, skipError("none given")
	}
	if r.found != nil && r.found.trust != nil && r.found.trust.ca == r.req.CA { // nothing has changed since the inspection: the workload is frozen
		return maps.Clone(r.found.trust.evidence), nil
	}
	block, _ := pem.Decode([]byte(r.req.CA))
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("the CA is not a PEM certificate")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the CA: %w", err)
	}
	bundles, err := trustInBundles(r.req.CA)
	if err != nil {
		return nil, err
	}
	link, err := trustInDir(trustDir, r.req.CA, cert)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(r.req.CA))
	evidence := Evidence{"bundles": strconv.Itoa(bundles), "hashed": link, "sha256": short(sum[:])}
	r.trust = &trust{ca: r.req.CA, files: trustFiles(trustBundles, trustDir, link), evidence: evidence}
	return maps.Clone(evidence), nil
}

// trust is what the last step of a reseal that installed a CA has left. A fork of a fork has the CA already, and reading a
// bundle and a certificate is a third of the code of a reseal. So an inspection looks whether the files are still those.
type trust struct {
	ca       string
	files    []fileState
	evidence Evidence
}

// fileState tells whether a file has been changed or replaced. It is zero without the file.
type fileState struct {
	path         string
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// trustFiles are the files that decide whether a CA is trusted, as they are now.
func trustFiles(bundles []string, dir, link string) []fileState {
	files := make([]fileState, 0, len(bundles)+2)
	for _, path := range bundles {
		files = append(files, stateOf(path, unix.Stat))
	}
	if link == "" { // the image has no directory
		return append(files, stateOf(dir, unix.Stat))
	}
	return append(files, stateOf(filepath.Join(dir, trustName), unix.Lstat), stateOf(filepath.Join(dir, link), unix.Lstat))
}

func stateOf(path string, stat func(string, *unix.Stat_t) error) fileState {
	var s unix.Stat_t
	if err := stat(path, &s); err != nil {
		return fileState{path: path}
	}
	return fileState{path, s.Dev, s.Ino, s.Size, s.Mtim, s.Ctim}
}

// unchanged says whether the files are as the step has left them.
func (t *trust) unchanged() bool {
	return t != nil && slices.Equal(t.files, trustFiles(trustBundles, trustDir, t.evidence["hashed"]))
}

// trustInBundles adds a CA to every existing bundle, or makes one.
func trustInBundles(ca string) (bundles int, err error) {
	seen := map[string]bool{}
	for _, p := range trustBundles {
		real, err := filepath.EvalSymlinks(p)
		if err != nil || seen[real] {
			continue
		}
		seen[real] = true
		bundle, err := os.ReadFile(real)
		if err != nil {
			return bundles, err
		}
		bundles++
		if bytes.HasSuffix(bundle, marked(ca)) { // it is there already, in a fork of a fork
			continue
		}
		if err := smallfile.Replace(real, addCA(bundle, ca), 0o644); err != nil {
			return bundles, err
		}
	}
	if bundles > 0 {
		return bundles, nil
	}
	if err := os.MkdirAll(trustDir, 0o755); err != nil {
		return 0, err
	}
	return 1, smallfile.Replace(trustBundles[0], addCA(nil, ca), 0o644)
}

func marked(ca string) []byte { return []byte(caBegin + strings.TrimRight(ca, "\n") + "\n" + caEnd) }

// addCA appends the CA to a bundle, and removes one that was added before.
func addCA(bundle []byte, ca string) []byte {
	if before, rest, ok := bytes.Cut(bundle, []byte(caBegin)); ok {
		_, after, _ := bytes.Cut(rest, []byte(caEnd))
		bundle = slices.Concat(before, after)
	}
	if len(bundle) > 0 && bundle[len(bundle)-1] != '\n' {
		bundle = append(bundle, '\n')
	}
	return append(bundle, marked(ca)...)
}

// trustInDir makes OpenSSL find a CA in a directory, and returns the file name; "" if the image has no such directory.
func trustInDir(dir, ca string, cert *x509.Certificate) (string, error) {
	if !smallfile.Exists(dir) {
		return "", nil
	}
	hash, err := subjectHash(cert.RawSubject)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, trustName)
	if is, err := os.ReadFile(path); err == nil && string(is) != ca { // of another project, if the checkpoint was imported from its file
		if err := unlinkTrust(dir); err != nil {
			return "", err
		}
	}
	if err := smallfile.Replace(path, []byte(ca), 0o644); err != nil {
		return "", err
	}
	for n := 0; ; n++ {
		link := fmt.Sprintf("%08x.%d", hash, n)
		err := unix.Symlink(trustName, filepath.Join(dir, link))
		if err == nil {
			return link, nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return "", err
		}
		if to, err := os.Readlink(filepath.Join(dir, link)); err == nil && to == trustName {
			return link, nil
		}
	}
}

// unlinkTrust removes all names of our CA.
func unlinkTrust(dir string) error {
	list, err := smallfile.List(dir)
	if err != nil {
		return err
	}
	for _, name := range list {
		path := filepath.Join(dir, name)
		if to, err := os.Readlink(path); err == nil && to == trustName {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// subjectHash computes the number by which OpenSSL (since 1.0) finds a certificate: the first four bytes of the SHA-1
// of its canonical subject. In it, every text is UTF-8, with ASCII in lower case and single spaces, and the outermost
// header is left out.
func subjectHash(subject []byte) (uint32, error) {
	var rdns pkix.RDNSequence
	if rest, err := asn1.Unmarshal(subject, &rdns); err != nil || len(rest) > 0 {
		return 0, errors.Join(errors.New("the CA's subject cannot be read"), err)
	}
	type attribute struct {
		Type  asn1.ObjectIdentifier
		Value asn1.RawValue
	}
	var canonical []byte
	for _, rdn := range rdns {
		var set []byte
		for _, a := range rdn {
			text, ok := a.Value.(string)
			if !ok {
				return 0, errors.New("the CA's subject contains a value that is not text")
			}
			text = canonicalText(text)
			b, err := asn1.Marshal(attribute{a.Type, asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: []byte(text)}})
			if err != nil {
				return 0, err
			}
			set = append(set, b...)
		}
		b, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSet, IsCompound: true, Bytes: set})
		if err != nil {
			return 0, err
		}
		canonical = append(canonical, b...)
	}
	sum := sha1.Sum(canonical) //nolint:gosec // G401: likewise
	return binary.LittleEndian.Uint32(sum[:]), nil
}

func canonicalText(s string) string {
	s = strings.Map(func(c rune) rune {
		if c >= 'A' && c <= 'Z' {
			return c - 'A' + 'a'
		}
		return c
	}, s)
	return strings.Join(strings.FieldsFunc(s, func(c rune) bool { return c == ' ' || c >= '\t' && c <= '\r' }), " ")
}
