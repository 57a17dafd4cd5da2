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
	if r.trust.holds(r.req.CA) {
		evidence := maps.Clone(r.trust.evidence)
		evidence["kept"] = "the files are unchanged since it was installed"
		return evidence, nil
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
	at, err := trustInDir(trustDir, r.req.CA, cert)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(r.req.CA))
	evidence := Evidence{"bundles": strconv.Itoa(bundles), "hashed": at.name(), "sha256": short(sum[:])}
	r.trust = remember(r.req.CA, at, evidence)
	return evidence, nil
}

// trust remembers the CA that was installed last, and the files as they were then. A fork of a fork has its CA already. To read the bundle
// and the certificate again would be a third of all code that a reseal executes, so only the metadata of the files is compared.
type trust struct {
	ca       string
	at       hashed
	files    []fileState
	evidence Evidence
}

// remember returns what is known of a CA that has just been installed; nil if that would be too many files.
func remember(ca string, at hashed, evidence Evidence) *trust {
	if at.number > maxBefore {
		return nil
	}
	return &trust{ca: ca, at: at, files: trustFiles(trustBundles, trustDir, at), evidence: maps.Clone(evidence)}
}

// maxBefore bounds the foreign certificates with the hash of ours whose files are remembered. An image has none.
const maxBefore = 16

// hashed is the name under which OpenSSL finds a certificate in a directory: a hash of its subject, and a number. It is zero if the image has
// no such directory.
type hashed struct {
	hash   string
	number int
}

func (h hashed) name() string {
	if h.hash == "" {
		return ""
	}
	return h.hash + "." + strconv.Itoa(h.number)
}

// fileState tells whether a file has been changed or replaced. It is zero without the file.
type fileState struct {
	path         string
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// trustFiles returns the files that decide whether a CA is trusted, as they are now. OpenSSL tries the numbers of a hash from 0 on, and stops
// at the first one that is missing.
func trustFiles(bundles []string, dir string, at hashed) []fileState {
	files := make([]fileState, 0, len(bundles)+at.number+2)
	for _, path := range bundles {
		files = append(files, stateOf(path, unix.Stat))
	}
	if at.hash == "" {
		return append(files, stateOf(dir, unix.Stat))
	}
	files = append(files, stateOf(filepath.Join(dir, trustName), unix.Lstat))
	for n := range at.number + 1 {
		files = append(files, stateOf(filepath.Join(dir, hashed{at.hash, n}.name()), unix.Lstat))
	}
	return files
}

func stateOf(path string, stat func(string, *unix.Stat_t) error) fileState {
	var s unix.Stat_t
	if err := stat(path, &s); err != nil {
		return fileState{path: path}
	}
	return fileState{path, s.Dev, s.Ino, s.Size, s.Mtim, s.Ctim}
}

// holds reports whether a CA is the one that was installed last, and nothing has changed its files since.
func (t *trust) holds(ca string) bool {
	return t != nil && t.ca == ca && slices.Equal(t.files, trustFiles(trustBundles, trustDir, t.at))
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

// trustInDir makes OpenSSL find a CA in a directory, and returns the name of its link. It does nothing if the image has no such directory.
func trustInDir(dir, ca string, cert *x509.Certificate) (hashed, error) {
	if !smallfile.Exists(dir) {
		return hashed{}, nil
	}
	hash, err := subjectHash(cert.RawSubject)
	if err != nil {
		return hashed{}, err
	}
	path := filepath.Join(dir, trustName)
	if is, err := os.ReadFile(path); err == nil && string(is) != ca { // of another project, if the checkpoint was imported from its file
		if err := unlinkTrust(dir); err != nil {
			return hashed{}, err
		}
	}
	if err := smallfile.Replace(path, []byte(ca), 0o644); err != nil {
		return hashed{}, err
	}
	for at := (hashed{hash: fmt.Sprintf("%08x", hash)}); ; at.number++ {
		link := filepath.Join(dir, at.name())
		err := unix.Symlink(trustName, link)
		if err == nil {
			return at, nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return hashed{}, err
		}
		if to, err := os.Readlink(link); err == nil && to == trustName {
			return at, nil
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
