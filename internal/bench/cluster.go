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
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// clusterRun is what a process of either implementation prints; see clusteronce.
type clusterRun struct {
	CPUSeconds  []float64 `json:"cpu_seconds"`
	MemoryBytes float64   `json:"memory_bytes"` // peak of the first run, above what the data itself takes
	PeakBytes   float64   `json:"peak_bytes"`   // the same, of the whole process
}

// both takes another run of the same into account.
func (r clusterRun) both(o clusterRun) clusterRun {
	return clusterRun{
		CPUSeconds:  append(r.CPUSeconds, o.CPUSeconds...),
		MemoryBytes: max(r.MemoryBytes, o.MemoryBytes), PeakBytes: max(r.PeakBytes, o.PeakBytes),
	}
}

// python is Debian's interpreter, for which its python3-sklearn is installed.
const python = "/usr/bin/python3"

//go:embed sklearn_dbscan.py
var sklearnScript string

// measureClustering runs the command once, which is clusteronce, beside
// scikit-learn.
func measureClustering(ctx context.Context, rep *report, once string, all bool) error {
	if once == "" {
		rep.LeftOut = append(rep.LeftOut, leftOut{"dbscan", "no command given with -cluster-once"})
		return nil
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
		reason := noSklearn
		if reason == "" && c.large && !all {
			reason = "takes minutes and 10 GB of memory; -all runs it"
		}
		rounds := 5 // of each in turn, so that what else the machine does hits both
		if c.large {
			rounds = 1
		}
		var ours, theirs clusterRun
		for range rounds {
			run, err := runCluster(exec.CommandContext(ctx, once, args(3, ourLabels)...))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			ours = ours.both(run)
			if reason != "" {
				continue
			}
			run, err = runCluster(exec.CommandContext(ctx, python, append([]string{"-c", sklearnScript}, args(1, theirLabels)...)...))
			if err != nil {
				return fmt.Errorf("%s scikit-learn: %w", name, err)
			}
			theirs = theirs.both(run)
		}
		note := ""
		if reason == "" {
			if note, err = compareFiles(ourLabels, theirLabels); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		} else {
			rep.LeftOut = append(rep.LeftOut, leftOut{name + " by scikit-learn", reason})
		}
		for _, v := range []struct {
			name, unit string
			value      func(clusterRun) float64
		}{
			{name, "CPU s", func(r clusterRun) float64 { return median(r.CPUSeconds) }},
			{name + ", peak memory", "MiB", func(r clusterRun) float64 { return r.PeakBytes / (1 << 20) }},
			{name + ", memory above the data", "MiB", func(r clusterRun) float64 { return r.MemoryBytes / (1 << 20) }},
		} {
			mine := row{Name: v.name, Subject: "ebpfllm", Value: v.value(ours), Unit: v.unit, Note: note}
			note = ""
			if reason != "" {
				rep.Rows = append(rep.Rows, mine)
				continue
			}
			sklearn := row{Name: v.name, Subject: "scikit-learn", Value: v.value(theirs), Unit: v.unit}
			mine.compare(sklearn, false)
			rep.Rows = append(rep.Rows, mine, sklearn)
		}
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
