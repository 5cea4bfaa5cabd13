//go:build linux && amd64

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfllm/ebpfllm/bpf"
)

// sample is what this process, and so the receiver, holds at one moment.
type sample struct {
	RSS        float64        `json:"rss_mib"`
	PeakRSS    float64        `json:"peak_rss_mib"`
	Heap       float64        `json:"live_heap_mib"` // after a collection
	Maps       float64        `json:"bpf_maps_mib"`
	Goroutines int            `json:"goroutines"`
	Files      int            `json:"open_files"`
	Entries    map[string]int `json:"map_entries"` // of the kernel side's maps that grow
}

const mib = 1 << 20

func takeSample() (s sample, err error) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s.Heap, s.Goroutines = float64(m.HeapAlloc)/mib, runtime.NumGoroutine()
	status, err := fields("/proc/self/status")
	if err != nil {
		return s, err
	}
	s.RSS, s.PeakRSS = kib(status["VmRSS"]), kib(status["VmHWM"])
	s.Entries = map[string]int{}
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	if err != nil {
		return s, err
	}
	s.Files = len(files)
	seen := map[string]bool{}
	for _, f := range files {
		info, err := fields(f)
		if errors.Is(err, os.ErrNotExist) {
			continue // the directory's own
		}
		if err != nil {
			return s, err
		}
		id := info["map_id"]
		if id == "" || seen[id] {
			continue
		}
		seen[id] = true
		bytes, err := strconv.ParseFloat(info["memlock"], 64)
		if err != nil {
			return s, fmt.Errorf("%s: memlock: %w", f, err)
		}
		s.Maps += bytes / mib
		if err := s.countEntries(id); err != nil {
			return s, err
		}
	}
	return s, nil
}

// countEntries counts the entries of a map of the kernel side. Those that lie in
// sockets are counted by the kernel side itself, in a variable.
func (s *sample) countEntries(id string) error {
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return err
	}
	m, err := ebpf.NewMapFromID(ebpf.MapID(n))
	if err != nil {
		return fmt.Errorf("open map %s: %w", id, err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return err
	}
	switch {
	case info.Type == ebpf.Hash || info.Type == ebpf.LRUHash:
		key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
		entries := 0
		for it := m.Iterate(); it.Next(&key, &value); {
			entries++
		}
		s.Entries[info.Name] = entries // an iteration that was disturbed by a deletion ends early or begins anew
	case strings.HasSuffix(info.Name, "bss"):
		spec, err := bpf.LoadKernel()
		if err != nil {
			return err
		}
		open := spec.Variables["conns_open"]
		value := make([]byte, m.ValueSize())
		if err := m.Lookup(uint32(0), &value); err != nil {
			return err
		}
		s.Entries["conns"] = int(binary.NativeEndian.Uint64(value[open.Offset:]))
	}
	return nil
}

// fields reads a file of lines "name: value".
func fields(path string) (map[string]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			m[name] = strings.TrimSpace(value)
		}
	}
	return m, nil
}

// kib reads a value of /proc/self/status, in MiB.
func kib(s string) float64 {
	n, _ := strconv.ParseFloat(strings.TrimSuffix(s, " kB"), 64)
	return n / 1024
}
