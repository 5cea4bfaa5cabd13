package dbscan_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

func BenchmarkCluster(b *testing.B) {
	for _, bc := range []struct {
		kind string
		n    int
	}{
		{"S", 1e4}, {"S", 1e5}, {"S", 1e6},
		{"W", 1e4}, {"W", 1e5}, {"W", 1e6},
		{"N", 1e4}, {"N", 1e5}, {"N", 1e6},
		{"Q", 1e5}, {"R", 1e5}, {"H", 1e4},
	} {
		b.Run(fmt.Sprintf("%s/%d", bc.kind, bc.n), func(b *testing.B) {
			s := dbscantest.Make(bc.kind, bc.n, 1)
			b.ReportAllocs()
			for b.Loop() {
				_, err := dbscan.Cluster(s.Points, s.Dims, s.Eps, s.MinSamples)
				require.NoError(b, err)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(bc.n), "ns/point")
		})
	}
}
