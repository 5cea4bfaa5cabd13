package dbscan_test

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// cpuTime is the CPU time of the process: what counts on a machine that has
// other things to do.
func cpuTime(b *testing.B) int64 {
	b.Helper()
	var ru syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &ru))
	return ru.Utime.Nano() + ru.Stime.Nano()
}

func reportCPU(b *testing.B, start int64) {
	b.Helper()
	b.ReportMetric(float64(cpuTime(b)-start)/float64(b.N), "cpu-ns/op")
}

func BenchmarkCluster(b *testing.B) {
	for _, bc := range []struct {
		kind string
		n    int
	}{
		{"S", 1e4},
		{"S", 1e5},
		{"S", 1e6},
		{"W", 1e4},
		{"W", 1e5},
		{"W", 1e6},
		{"N", 1e4},
		{"N", 1e5},
		{"N", 1e6},
		{"Q", 1e5},
		{"R", 1e5},
		{"H", 1e4},
		{"H", 1e6},
	} {
		b.Run(fmt.Sprintf("%s/%d", bc.kind, bc.n), func(b *testing.B) {
			s := dbscantest.Make(bc.kind, bc.n, 1)
			b.ReportAllocs()
			start := cpuTime(b)
			for b.Loop() {
				_, err := dbscan.Cluster(s.Points, s.Dims, s.Eps, s.MinSamples)
				require.NoError(b, err)
			}
			reportCPU(b, start)
		})
	}
}

// BenchmarkWindow is one step of a second of a 60 s window at a steady rate,
// and reading every label.
func BenchmarkWindow(b *testing.B) {
	for _, n := range []int{1000, 10_000, 100_000, 1_000_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			const span = 120 // scaled: 60 s of half a second
			s := dbscantest.Make("W", n, 1)
			w := dbscan.NewWindow(s.Dims, span, s.Eps, s.MinSamples)
			byTime := make([][3]float64, n)
			for i := range byTime {
				copy(byTime[i][:], s.Points[3*i:])
			}
			slices.SortFunc(byTime, func(p, q [3]float64) int { return cmp.Compare(p[0], q[0]) })
			next, end, sum := 0, 0.0, int64(0)
			step := func() {
				end += 2
				for ; ; next++ { // the same minute over and over
					p := byTime[next%n]
					if p[0] += float64(next / n * span); p[0] >= end {
						break
					}
					require.NoError(b, w.Add(uint64(next), p[:]))
				}
				_, err := w.Step(end)
				require.NoError(b, err)
				for l := range w.Labels() {
					sum += int64(l.Label)
				}
			}
			for end < span {
				step()
			}
			b.ReportAllocs()
			start := cpuTime(b)
			for b.Loop() {
				step()
			}
			reportCPU(b, start)
		})
	}
}
