// Command clusteronce clusters a file of points and prints what that took, as
// JSON:
//
//	clusteronce POINTS DIMS EPS MIN_SAMPLES RUNS LABELS
//
// POINTS holds float64 and LABELS one int32 for each point and then one byte for
// its core flag, little-endian. It is a program of its own so that its memory is
// that of clustering.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

type result struct {
	CPUSeconds  []float64 `json:"cpu_seconds"`
	MemoryBytes float64   `json:"memory_bytes"` // peak of the first run, above what the data itself takes
	PeakBytes   float64   `json:"peak_bytes"`   // the same, of the whole process
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "clusteronce:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 6 {
		return errors.New("want POINTS DIMS EPS MIN_SAMPLES RUNS LABELS")
	}
	points, err := readFloats(args[0])
	if err != nil {
		return err
	}
	dims, err1 := strconv.Atoi(args[1])
	eps, err2 := strconv.ParseFloat(args[2], 64)
	minSamples, err3 := strconv.Atoi(args[3])
	runs, err4 := strconv.Atoi(args[4])
	for _, err := range []error{err1, err2, err3, err4} {
		if err != nil {
			return err
		}
	}

	var r result
	var res dbscan.Result
	debug.FreeOSMemory()
	before, err := memory("VmRSS:")
	if err != nil {
		return err
	}
	for i := range runs {
		runtime.GC()
		start := cpuTime()
		if res, err = dbscan.Cluster(points, dims, eps, minSamples); err != nil {
			return err
		}
		r.CPUSeconds = append(r.CPUSeconds, (cpuTime() - start).Seconds())
		if i == 0 {
			peak, err := memory("VmHWM:")
			if err != nil {
				return err
			}
			r.MemoryBytes, r.PeakBytes = peak-before, peak
		}
	}

	out := make([]byte, 0, 5*len(res.Labels))
	for _, l := range res.Labels {
		out = binary.LittleEndian.AppendUint32(out, uint32(l))
	}
	for _, c := range res.Core {
		b := byte(0)
		if c {
			b = 1
		}
		out = append(out, b)
	}
	if err := os.WriteFile(args[5], out, 0o600); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// memory reads a size from /proc/self/status, in bytes. (ru_maxrss would count
// the memory of the parent before exec.)
func memory(key string) (float64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == key {
			kib, err := strconv.ParseFloat(f[1], 64)
			return kib * 1024, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/self/status", key)
}

// cpuTime is the user and system time of this process so far.
func cpuTime() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		panic(err) // cannot happen for RUSAGE_SELF
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func readFloats(path string) ([]float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	x := make([]float64, info.Size()/8)
	r := bufio.NewReaderSize(f, 1<<16)
	var b [8]byte
	for i := range x {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return nil, err
		}
		x[i] = math.Float64frombits(binary.LittleEndian.Uint64(b[:]))
	}
	return x, nil
}
