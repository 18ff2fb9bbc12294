// Compiles WGSL files with Tint, by Dawn for Node on its null backend, which needs no GPU.
//
//   node tint.mjs PACKAGE FOLDER
//
// PACKAGE is the folder of the npm package `webgpu`. FOLDER holds folders of WGSL files, and devices.json, which says for
// each of them which features its device has and whether its kernels keep to WebGPU's minimum limits: the null backend
// has no others, so that only these become pipelines. The last line of output is a JSON list of messages.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [packageFolder, folder] = process.argv.slice(2);
const { create, globals } = await import(pathToFileURL(join(packageFolder, 'index.js')));
Object.assign(globalThis, globals);
const gpu = create(['backend=null', 'enable-dawn-features=allow_unsafe_apis']);  // matrices are experimental
const messages = [];

for (const [name, { features, minimumLimits }] of Object.entries(JSON.parse(readFileSync(join(folder, 'devices.json'))))) {
  const adapter = await gpu.requestAdapter();
  const device = await adapter.requestDevice({ requiredFeatures: features });
  for (const file of readdirSync(join(folder, name)).sort()) {
    const path = join(folder, name, file);
    messages.push(...(await compile(device, readFileSync(path, 'utf8'), minimumLimits)).map((text) => ({ path, text })));
  }
  device.destroy();
}
console.log(JSON.stringify(messages));
process.exit(0);

async function compile(device, source, withPipeline) {
  // naga, which compiles the kernels elsewhere, does not parse these lines
  const bare = source.replace(/\/\/.*/g, '');
  const matrices = bare.includes('subgroup_matrix') ? 'enable f16; enable chromium_experimental_subgroup_matrix; ' : '';
  const code = (/\bsubgroup(_|[A-Z])/.test(bare) ? 'enable subgroups; ' : '') + matrices + source;
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code });
  const found = (await module.getCompilationInfo()).messages.map((m) => `${m.lineNum}:${m.linePos} ${m.type}: ${m.message}`);
  if (withPipeline && !found.length) {
    device.createComputePipeline({ layout: 'auto', compute: { module, entryPoint: 'main' } });
  }
  const error = await device.popErrorScope();
  return error && !found.length ? [error.message] : found;
}
