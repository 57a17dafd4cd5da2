package s3

import (
	"bytes"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/coppice-dev/coppice/internal/testleak"
	"github.com/coppice-dev/coppice/internal/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// open opens a store at a server that listens at an address: its own, or a proxy's.
func open(tb testing.TB, server *tests3.Server, address, bucket, prefix string, change ...func(*Config)) *Store {
	tb.Helper()
	cfg := Config{
		Endpoint: "http://" + address, Region: tests3.Region, Bucket: bucket, Prefix: prefix, PathStyle: true,
		Credentials: Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey},
	}
	for _, c := range change {
		c(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	for name, prefix := range map[string]string{"bucket": "", "prefix": "stores/one"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			blobtest.Run(t, func(tb testing.TB) blobtest.Store {
				tb.Helper()
				bucket, client := server.Bucket(tb), server.Client(tb)
				s := open(tb, server, server.Address, bucket, prefix)
				return blobtest.Store{
					Blobs: s,
					Abandon: func(tb testing.TB, key string) {
						tb.Helper()
						id, err := client.NewMultipartUpload(tb.Context(), bucket, s.name(key), minio.PutObjectOptions{})
						if err == nil {
							_, err = client.PutObjectPart(tb.Context(), bucket, s.name(key), id, 1, bytes.NewReader([]byte("part")), 4, minio.PutObjectPartOptions{})
						}
						if err != nil {
							tb.Fatal(err)
						}
					},
					Leftovers: func(tb testing.TB) int {
						tb.Helper()
						found, err := client.ListMultipartUploads(tb.Context(), bucket, "", "", "", "", page)
						if err != nil {
							tb.Fatal(err)
						}
						return len(found.Uploads)
					},
				}
			})
		})
	}
}
