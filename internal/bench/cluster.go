package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// Both implementations run in a process of their own that reads the same file
// of points, prints a clusterRun and writes its labels:
//
//	COMMAND POINTS DIMS EPS MIN_SAMPLES RUNS LABELS
//
// POINTS holds float64 and LABELS one int32 for each point and then one byte
// for its core flag, little-endian.
type clusterRun struct {
	CPUSeconds  []float64 `json:"cpu_seconds"`
	MemoryBytes float64   `json:"memory_bytes"` // peak of the first run, above what the data itself takes
}

// python is Debian's interpreter, for which its python3-sklearn is installed.
const python = "/usr/bin/python3"

//go:embed sklearn_dbscan.py
var sklearnScript string

// clusterCommand is the argument that makes this program a clusterRun of ours.
const clusterCommand = "cluster-once"

func measureClustering(ctx context.Context, rep *report, all bool) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("clustering: %w", err)
	}
	dir, err := os.MkdirTemp("", "ebpfllm-bench-")
	if err != nil {
		return fmt.Errorf("clustering: %w", err)
	}
	defer os.RemoveAll(dir)

	noSklearn := ""
	if out, err := exec.CommandContext(ctx, python, "-c", "import sklearn.cluster").CombinedOutput(); err != nil {
		noSklearn = fmt.Sprintf("not installed (Debian: python3-sklearn): %s", lastLine(out, err))
	}

	for _, c := range []struct {
		name, kind string
		n          int
		large      bool // for scikit-learn
	}{
		{"dbscan S 1e5", "S", 1e5, false},
		{"dbscan W 1e5", "W", 1e5, false},
		{"dbscan W 1e6", "W", 1e6, true},
	} {
		name := c.name
		set := dbscantest.Make(c.kind, c.n, 1)
		points := filepath.Join(dir, "points")
		if err := writeFloats(points, set.Points); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		args := func(runs int, labels string) []string {
			return []string{
				points, strconv.Itoa(set.Dims), strconv.FormatFloat(set.Eps, 'g', -1, 64),
				strconv.Itoa(set.MinSamples), strconv.Itoa(runs), labels,
			}
		}
		ourLabels, theirLabels := filepath.Join(dir, "ours"), filepath.Join(dir, "theirs")
		ours, err := runCluster(exec.CommandContext(ctx, self, append([]string{clusterCommand}, args(5, ourLabels)...)...))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		cpu := row{Name: name, Subject: "ebpfllm", Value: median(ours.CPUSeconds), Unit: "CPU s"}
		mem := row{Name: name + ", memory", Subject: "ebpfllm", Value: ours.MemoryBytes / (1 << 20), Unit: "MiB"}

		reason := noSklearn
		if reason == "" && c.large && !all {
			reason = "takes minutes and 10 GB of memory; -all runs it"
		}
		if reason != "" {
			rep.Rows = append(rep.Rows, cpu, mem)
			rep.LeftOut = append(rep.LeftOut, leftOut{name + " by scikit-learn", reason})
			continue
		}
		runs := 3
		if c.large {
			runs = 1
		}
		theirs, err := runCluster(exec.CommandContext(ctx, python, append([]string{"-c", sklearnScript}, args(runs, theirLabels)...)...))
		if err != nil {
			return fmt.Errorf("%s scikit-learn: %w", name, err)
		}
		note, err := compareFiles(ourLabels, theirLabels)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		theirCPU := row{Name: name, Subject: "scikit-learn", Value: median(theirs.CPUSeconds), Unit: "CPU s"}
		theirMem := row{Name: name + ", memory", Subject: "scikit-learn", Value: theirs.MemoryBytes / (1 << 20), Unit: "MiB"}
		cpu.Note = note
		cpu.compare(theirCPU, false)
		mem.compare(theirMem, false)
		rep.Rows = append(rep.Rows, cpu, theirCPU, mem, theirMem)
	}
	return nil
}

func runCluster(cmd *exec.Cmd) (clusterRun, error) {
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return clusterRun{}, fmt.Errorf("%s: %w: %s", cmd.Path, err, lastLine(stderr.Bytes(), err))
	}
	var r clusterRun
	if err := json.Unmarshal(out, &r); err != nil {
		return clusterRun{}, fmt.Errorf("%s printed no result: %w", cmd.Path, err)
	}
	if len(r.CPUSeconds) == 0 {
		return clusterRun{}, fmt.Errorf("%s printed no CPU times", cmd.Path)
	}
	return r, nil
}

func lastLine(out []byte, err error) string {
	if s := strings.TrimSpace(string(out)); s != "" {
		return s[strings.LastIndexByte(s, '\n')+1:]
	}
	return err.Error()
}

func compareFiles(a, b string) (string, error) {
	x, err := os.ReadFile(a)
	if err != nil {
		return "", err
	}
	y, err := os.ReadFile(b)
	if err != nil {
		return "", err
	}
	if !bytes.Equal(x, y) {
		return "", errors.New("labels differ from scikit-learn's")
	}
	return "labels equal scikit-learn's to the letter", nil
}

func writeFloats(path string, x []float64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<16)
	var b [8]byte
	for _, v := range x {
		binary.LittleEndian.PutUint64(b[:], math.Float64bits(v))
		if _, err := w.Write(b[:]); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return f.Close()
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

// clusterMain is this program as a process that clusters.
func clusterMain(args []string) error {
	if len(args) != 6 {
		return fmt.Errorf("%s: want POINTS DIMS EPS MIN_SAMPLES RUNS LABELS", clusterCommand)
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

	var r clusterRun
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
			r.MemoryBytes = peak - before
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
